#!/bin/bash
# Trains {file}; written by `millrace launch slurm`.
{directives}
umask 077
# A secret, which exists while the run lasts. It is not in run_dir, which people share.
export ticket={ticket}-"$SLURM_JOB_ID"
rm -f "$ticket"

# The controller and the trainer, on the first node. At preemption and before the time limit, SLURM
# sends SIGTERM to this script. It makes them write a checkpoint and exit with {preempted}.
trap 'was_signalled=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
{controller} &
controller=$!
{steps}
# A signal ends `wait` early.
code=
while [ -z "$code" ]; do
    was_signalled=
    wait "$controller"
    code=$?
    [ -z "$was_signalled" ] || code=
done
# A job that was cancelled is not RUNNING any more, and stays cancelled.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [ "$code" = {preempted} ] && [ "$state" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
