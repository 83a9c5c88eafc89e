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
from textwrap import indent

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
    controller = _pod(plan, pods, "controller", command=train, restart="Never")
    job = f"""\
# The controller and the trainer. A preempted one (exit code {PREEMPTED}) starts again and resumes.
apiVersion: batch/v1
kind: Job
metadata: {{name: {plan.name}}}
spec:
  backoffLimit: {MAX_FAILURES}
  podFailurePolicy:
    rules:
      - action: Ignore
        onExitCodes: {{containerName: controller, operator: In, values: [{PREEMPTED}]}}
      - action: Ignore
        onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
      - action: FailJob
        onExitCodes: {{containerName: controller, operator: In, values: [2]}}
  template:
{indent(controller, "    ")}"""
    sets = (_stateful_set(plan, pods, nodes, ticket=ticket) for nodes in plan.joining)
    return "---\n".join([job, *sets])


def _stateful_set(
    plan: LaunchPlan, pods: Mapping[str, str], nodes: JoiningNodes, *, ticket: str
) -> str:
    name = f"{plan.name}-{nodes.role}"
    logs = shlex.quote(f"{_run_dir(plan)}/logs")
    join = (
        f"trap 'exit 0' TERM; until [ -e {ticket} ]; do sleep 1; done;"
        f" exec millrace join {ticket} {nodes.options} --log-dir {logs}"
    )
    return f"""\
# The role {nodes.role}. Each pod waits for the ticket of the run and joins; it joins again when the
# run resumes.
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: {name}}}
spec:
  replicas: {nodes.num_nodes}
  serviceName: {name}
  podManagementPolicy: Parallel
  selector: {{matchLabels: {{app: {plan.name}, role: {nodes.role}}}}}
  template:
{indent(_pod(plan, pods, nodes.role, command=join), "    ")}---
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  selector: {{app: {plan.name}, role: {nodes.role}}}
"""


def _rayjob(plan: LaunchPlan, pods: Mapping[str, str]) -> str:
    train = f"millrace {plan.train(_file(plan), '--cluster.launcher ray')}"
    lock = shlex.quote(f"{_run_dir(plan)}/run.lock")
    # Ray does not pass SIGTERM on; the lock file of the run holds the controller's process id.
    stop = f"pid=$(cat {lock}) && kill -TERM $pid && tail --pid=$pid -f /dev/null"
    head = _pod(plan, pods, "controller", before_stop=stop)
    workers = f"""
    workerGroupSpecs:
      - groupName: engines
        replicas: {plan.num_nodes - 1}
        minReplicas: {plan.num_nodes - 1}
        maxReplicas: {plan.num_nodes - 1}
        rayStartParams: {{}}
        template:
{indent(_pod(plan, pods, "engines"), " " * 10)}"""
    return f"""\
# For the KubeRay operator. The controller runs on the head; Ray places trainer ranks and engines.
apiVersion: ray.io/v1
kind: RayJob
metadata: {{name: {plan.name}}}
spec:
  entrypoint: {json.dumps(train)}
  backoffLimit: {MAX_FAILURES}
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    headGroupSpec:
      rayStartParams: {{}}
      template:
{indent(head, " " * 8).rstrip()}{workers if plan.num_nodes - 1 else ""}
"""


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
    return f"""\
metadata:
  labels: {{app: {plan.name}, role: {role}}}
spec:
  terminationGracePeriodSeconds: {plan.kill_after_s}{policy}
  containers:
    - name: {role}
      image: {pods["image"]}
      workingDir: {MOUNT}{lines}
      env:
        - {{name: {env}}}
      envFrom:  # keys such as HF_TOKEN: kubectl create secret generic {plan.name}-keys ...
        - secretRef: {{name: {plan.name}-keys, optional: true}}
      volumeMounts:
        - {{name: workspace, mountPath: {MOUNT}}}
        - {{name: shm, mountPath: /dev/shm}}
  volumes:
    - {{name: workspace, persistentVolumeClaim: {{claimName: {pods["claim"]}}}}}
    - {{name: shm, emptyDir: {{medium: Memory}}}}
"""


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
