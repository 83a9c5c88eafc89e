"""The sbatch script of a run: one srun step for the controller, and one for each role that joins.

Promise: the script requeues its job after a preemption or before the time limit, and never after
scancel. The ticket is a file of mode 0600 beside run_dir; no secret is on a command line.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from millrace.cli.commands import PREEMPTED
from millrace.cli.launch.plan import JoiningNodes, LaunchPlan

REJOIN_S = 5  # between two attempts of a node to join


def slurm_script(plan: LaunchPlan, *, options: Sequence[str]) -> str:
    """`options`: further options of sbatch."""
    run_dir = Path(plan.config.run_dir).absolute()
    lines = [
        f"--job-name={plan.name}",
        f"--nodes={plan.num_nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={max(plan.gpus.values())}"] if plan.gpus else []),
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        f"--output={shlex.quote(f'{run_dir}.slurm-%j.log')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{plan.kill_after_s}",
        *options,
    ]
    directives = "\n".join(f"#SBATCH {line}" for line in lines)
    python = f"{shlex.quote(sys.executable)} -m millrace"
    address = shlex.quote(plan.config.cluster.address)
    joining = [f"--cluster.address {address}", '--cluster.ticket "$ticket"']
    more = joining if plan.joining else []
    logs = run_dir / "logs"
    steps = "".join(_step(plan, nodes, python=python, logs=logs) for nodes in plan.joining)
    return f"""\
#!/bin/bash
# Trains {plan.file}; written by `millrace launch slurm`.
{directives}
umask 077
# A secret, which exists while the run lasts. It is not in run_dir, which people share.
export ticket={shlex.quote(f"{run_dir}.ticket")}-"$SLURM_JOB_ID"
rm -f "$ticket"

# The controller and the trainer, on the first node. At preemption and before the time limit, SLURM
# sends SIGTERM to this script. It makes them write a checkpoint and exit with {PREEMPTED}.
trap 'was_signalled=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
{_srun(plan, "controller", nodes=1, first=0)} \\
    {python} {plan.train(str(plan.file), *more)} &
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
if [ "$code" = {PREEMPTED} ] && [ "$state" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _step(plan: LaunchPlan, nodes: JoiningNodes, *, python: str, logs: Path) -> str:
    join = f'{python} join "$ticket" {nodes.options} --log-dir {shlex.quote(str(logs))}'
    loop = f'while [ -e "$ticket" ]; do {join} || sleep {REJOIN_S}; done'
    step = _srun(plan, nodes.role, nodes=nodes.num_nodes, first=nodes.first)
    workers = "Ranks of the trainer" if nodes.role == "trainer" else "Engines"
    return f"""
# {workers}, on other nodes. A node joins again until the run ends and removes its ticket.
(
    while [ ! -e "$ticket" ] && kill -0 "$controller" 2>/dev/null; do sleep 1; done
    exec {step} bash -c {shlex.quote(loop)}
) &
"""


def _srun(plan: LaunchPlan, role: str, *, nodes: int, first: int) -> str:
    gpus = f" --gpus-per-node={plan.gpus[role]}" if plan.gpus.get(role) else ""
    return f"srun --nodes={nodes} --ntasks={nodes} --relative={first} --cpu-bind=none{gpus}"
