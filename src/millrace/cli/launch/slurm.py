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

TEMPLATE = Path(__file__).with_name("sbatch.sh")
REJOIN_S = 5  # between two attempts of a node to join


def slurm_script(plan: LaunchPlan, *, options: Sequence[str]) -> str:
    """`options`: further options of sbatch."""
    run_dir = Path(plan.config.run_dir).absolute()
    lines = [
        f"--job-name={plan.name}",
        f"--nodes={plan.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={plan.cpus}",  # SLURM would give a task one
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
    srun = _srun(plan, "controller", nodes=1, first=0)
    return TEMPLATE.read_text().format(
        file=plan.file,
        directives=directives,
        ticket=shlex.quote(f"{run_dir}.ticket"),
        preempted=PREEMPTED,
        controller=f"{srun} \\\n    {python} {plan.train(str(plan.file), *more)}",
        steps=steps,
    )


def _step(plan: LaunchPlan, nodes: JoiningNodes, *, python: str, logs: Path) -> str:
    join = f'{python} join "$ticket" {nodes.options} --log-dir {shlex.quote(str(logs))}'
    loop = f'while [ -e "$ticket" ]; do {join} || sleep {REJOIN_S}; done'
    step = _srun(plan, nodes.role, nodes=nodes.num_nodes, first=nodes.first)
    if nodes.role == "environments":
        step += " --overlap"  # with the step of the engines or ranks on the same nodes
    return f"""
# Role {nodes.role}, on other nodes. A node joins again until the run ends and removes its ticket.
(
    while [ ! -e "$ticket" ] && kill -0 "$controller" 2>/dev/null; do sleep 1; done
    exec {step} bash -c {shlex.quote(loop)}
) &
"""


def _srun(plan: LaunchPlan, role: str, *, nodes: int, first: int) -> str:
    # A step without a number gets all GPUs that the job has on its nodes.
    gpus = f" --gpus-per-node={plan.gpus.get(role, 0)}" if plan.gpus else ""
    return f"srun --nodes={nodes} --ntasks={nodes} --relative={first} --cpu-bind=none{gpus}"
