"""Kubernetes manifests of a run: a Job and StatefulSets, or a RayJob for the KubeRay operator.

All pods mount one volume at MOUNT, which holds the folder of the settings and the run directory.

Promise: the cluster waits longer than checkpoint.grace_s before it kills the controller, and starts
it again after exit code 75. Keys of the user come from a Secret; the ticket is a file of mode 0600
on the volume.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any

from millrace.cli.commands import PREEMPTED
from millrace.cli.launch.plan import JoiningNodes, LaunchPlan
from millrace.core.errors import ConfigError

MOUNT = "/workspace"
MAX_FAILURES = 6  # of the controller, beside preemptions


def manifests(plan: LaunchPlan, *, image: str, claim: str, kind: str) -> str:
    """`claim`: name of the PersistentVolumeClaim."""
    pods = {"image": json.dumps(image), "claim": json.dumps(claim)}
    return (_rayjob if kind == "rayjob" else _job)(plan, pods)


def _job(plan: LaunchPlan, pods: Mapping[str, str]) -> str:
    """The controller is a Job, because it ends; others are StatefulSets, because they rejoin."""
    ticket = shlex.quote(f"{_run_dir(plan)}.ticket")
    address = f"--cluster.address {shlex.quote(plan.config.cluster.address)}"
    joining = [address, '--cluster.advertise "$POD_IP"', f"--cluster.ticket {ticket}"]
    more = joining if plan.joining else []
    train = f"rm -f {ticket}; exec millrace {plan.train(_file(plan), *more)}"
    pod = _pod(plan, pods, "controller", command=train, restart="Never")
    limits = {"max_failures": MAX_FAILURES, "preempted": PREEMPTED}
    job = _filled("job", name=plan.name, **limits, pod=indent(pod, "    "))
    sets = (_stateful_set(plan, pods, nodes, ticket=ticket) for nodes in plan.joining)
    return "---\n".join([job, *sets])


def _stateful_set(
    plan: LaunchPlan, pods: Mapping[str, str], nodes: JoiningNodes, *, ticket: str
) -> str:
    logs = shlex.quote(f"{_run_dir(plan)}/logs")
    join = (
        f"trap 'exit 0' TERM; until [ -e {ticket} ]; do sleep 1; done;"
        f" exec millrace join {ticket} {nodes.options} --log-dir {logs}"
    )
    pod = indent(_pod(plan, pods, nodes.role, command=join), "    ")
    about = {"name": plan.name, "role": nodes.role, "num_nodes": nodes.num_nodes}
    return _filled("stateful_set", **about, pod=pod)


def _rayjob(plan: LaunchPlan, pods: Mapping[str, str]) -> str:
    train = f"millrace {plan.train(_file(plan), '--cluster.launcher ray')}"
    lock = shlex.quote(f"{_run_dir(plan)}/run.lock")
    # Ray does not pass SIGTERM on; the lock file of the run holds the controller's process id.
    stop = f"pid=$(cat {lock}) && kill -TERM $pid && tail --pid=$pid -f /dev/null"
    head = _pod(plan, pods, "controller", before_stop=stop)
    about = {"name": plan.name, "train": json.dumps(train), "max_failures": MAX_FAILURES}
    text = _filled("rayjob", **about, head=indent(head, " " * 8))
    if (num_nodes := plan.num_nodes - 1) > 0:
        pod = indent(_pod(plan, pods, "engines"), " " * 10)
        text += _filled("rayjob_workers", num_nodes=num_nodes, pod=pod)
    return text


def _pod(
    plan: LaunchPlan,
    pods: Mapping[str, str],
    role: str,
    *,
    command: str | None = None,
    restart: str | None = None,
    before_stop: str | None = None,
) -> str:
    """The template of a pod; without a command, that of its image or operator."""
    gpus = plan.gpus.get(role, 0)
    more = [
        f"command: {json.dumps(['sh', '-c', command])}" if command else "",
        f"resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}" if gpus else "",
        f"lifecycle: {{preStop: {{exec: {{command: {json.dumps(['sh', '-c', before_stop])}}}}}}}"
        if before_stop
        else "",
    ]
    lines = "".join(f"\n      {line}" for line in more if line)
    env = "POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}"
    if before_stop:
        env = f'RAY_JOB_STOP_WAIT_TIME_S, value: "{plan.kill_after_s}"'
    policy = f"\n  restartPolicy: {restart}" if restart else ""
    more = {"kill_after_s": plan.kill_after_s, "policy": policy, "lines": lines, "env": env}
    return _filled("pod", name=plan.name, role=role, mount=MOUNT, **more, **pods)


def _filled(template: str, **values: Any) -> str:
    text = Path(__file__).with_name(f"{template}.yaml").read_text()
    return Template(text).substitute({k: str(v).rstrip() for k, v in values.items()})


def _file(plan: LaunchPlan) -> str:
    return f"{MOUNT}/{plan.file.name}"


def _run_dir(plan: LaunchPlan) -> str:
    folder, run_dir = plan.file.parent, Path(plan.config.run_dir).resolve()
    if not run_dir.is_relative_to(folder) or run_dir == folder:
        raise ConfigError(
            f"run_dir = {str(run_dir)!r} is not below {str(folder)!r}, the folder that all pods"
            " mount, and would be lost with its pod; give a relative path in the file."
        )
    return f"{MOUNT}/{run_dir.relative_to(folder)}"
