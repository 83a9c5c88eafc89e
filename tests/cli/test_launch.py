"""`millrace launch`: what it writes, what it refuses, and that its commands run as written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli_w
import yaml
from project import REPOSITORY, make_project, steps_in

from millrace.cli.main import main

PODS = ("--image", "registry/millrace:1", "--claim", "work")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with settings and nothing else."""
    folder = tmp_path / "My Run"
    folder.mkdir()
    settings = {"model": "m", "run_dir": "run", "checkpoint": {"grace_s": 90}}
    (folder / "run.toml").write_text(tomli_w.dumps(settings))
    monkeypatch.chdir(folder)
    return folder


def launch(*arguments: str) -> str:
    """What the command writes."""
    assert main(["launch", *arguments[:2], "--output", "written", *arguments[2:]]) == 0
    return Path("written").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine.remote", "4"], "engine.remote = 4 needs nodes beside the controller's, and"),
        (
            ["--trainer.ranks", "2", "--trainer.remote", "1"],
            "trainer.remote = 1 needs nodes beside the controller's, and --nodes is 1; give",
        ),
        (
            ["--nodes=2", "--trainer.ranks=2", "--trainer.remote=1", "--engine.remote=1"],
            "engine.remote = 1 needs nodes beside the trainer's, and --nodes is 2; give --nodes 3",
        ),
        (
            ["--nodes=3", "--trainer.ranks=5", "--trainer.remote=2"],
            "trainer.remote = 2 cannot be shared by nodes with 3 ranks each",
        ),
        (
            ["--environment.remote", "1"],
            "environment.remote = 1 needs nodes beside the controller's, and --nodes is 1; give",
        ),
        (
            ["--nodes=3", "--engine.remote=2", "--environment.remote=5"],
            "by the 2 nodes that --nodes 3 leaves for environments; set environment.remote to 4",
        ),
        (["--nodes", "2"], "engine.remote = 0 cannot be shared equally by the 1 node"),
        (["--nodes", "4", "--engine.remote", "5"], "set engine.remote to 6, or change --nodes"),
        (["--nodes", "0"], "--nodes 0 leaves no node for the controller"),
        (["--gpus", "engine=8"], "names an unknown role; did you mean 'engines'?"),
        (["--gpus", "many"], "has no number; write --gpus 8"),
        (["--nodes=2", "--engine.remote=2", "--weights.transport=shm"], "on this host only"),
        (["--engine.remot", "2"], "did you mean 'remote'?"),
    ],
)
def test_plan_that_cannot_run_is_refused_in_one_sentence(folder, arguments, sentence, capsys):
    assert main(["launch", "slurm", "run.toml", *arguments]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--claim", "work"], "give --image IMAGE and --claim NAME"),
        ([*PODS, "--", "--time=1"], "'--time=1' after -- is an option of sbatch"),
    ],
)
def test_incomplete_pods_are_refused_in_one_sentence(folder, arguments, sentence, capsys):
    assert main(["launch", "kubernetes", "run.toml", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_run_directory_outside_the_volume_is_refused(folder, capsys):
    text = (folder / "run.toml").read_text().replace('"run"', '"../elsewhere"')
    (folder / "run.toml").write_text(text)
    assert main(["launch", "kubernetes", "run.toml", *PODS]) == 2
    assert "would be lost with its pod; give a relative path" in capsys.readouterr().err


# SLURM


def test_sbatch_script_has_a_step_for_each_role_and_no_secret(folder):
    script = launch(
        *("slurm", "run.toml", "--nodes", "3", "--engine.remote", "4", "--gpus", "8"),
        *("--gpus", "engines=4", "--trainer.steps", "7", "--", "--time=24:00:00"),
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for line in (
        "--job-name=my-run",
        "--nodes=3",
        "--gpus-per-node=8",
        "--signal=B:TERM@120",
        "--requeue",
        "--time=24:00:00",
    ):
        assert f"#SBATCH {line}\n" in script
    assert "--nodes=1 --ntasks=1 --relative=0 --cpu-bind=none --gpus-per-node=8" in script
    assert "--nodes=2 --ntasks=2 --relative=1 --cpu-bind=none --gpus-per-node=4" in script
    assert "--auto-resume --engine.remote 4 --trainer.steps 7 --cluster.address" in script
    assert 'join "$ticket" --count 2 --log-dir' in script
    assert f"export ticket='{folder}/run.ticket'-" in script


@pytest.mark.parametrize(
    ("arguments", "cpus"),
    [
        ([], 3),  # the controller, the trainer and an engine
        (["--cluster.threads=4", "--evaluate.engines=2"], 17),
        (["--gpus=8"], 9),
        (["--nodes=3", "--engine.remote=16"], 8),
        (["--nodes=3", "--engine.remote=4", "--environment.remote=20"], 12),
        (["--nodes=2", "--environment.workers=6", "--environment.remote=2"], 9),
    ],
)
def test_each_node_has_cpus_for_all_processes_of_the_fullest(folder, arguments, cpus):
    script = launch("slurm", "run.toml", *arguments)
    assert f"#SBATCH --cpus-per-task={cpus}\n" in script
    chosen = launch("slurm", "run.toml", *arguments, "--", "--cpus-per-task=64")
    directives = [line for line in chosen.splitlines() if "cpus-per-task" in line]
    assert directives[-1] == "#SBATCH --cpus-per-task=64", "sbatch takes the last"


def test_ranks_on_other_nodes_have_a_step_and_pods_of_their_own(folder):
    given = ("--nodes", "4", "--trainer.ranks", "16", "--trainer.remote", "8", "--gpus", "8")
    given = (*given, "--engine.count", "0", "--engine.remote", "16")
    script = launch("slurm", "run.toml", *given)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    steps = [line for line in script.splitlines() if "exec srun" in line]
    assert "--nodes=1 --ntasks=1 --relative=1 " in steps[0]
    assert 'join "$ticket" --role trainer --count 8 ' in steps[0]
    assert "--nodes=2 --ntasks=2 --relative=2 " in steps[1]
    assert 'join "$ticket" --count 8 ' in steps[1]
    text = launch("kubernetes", "run.toml", *PODS, *given)
    pods = [made["spec"] for made in yaml.safe_load_all(text) if made["kind"] == "StatefulSet"]
    assert [(spec["serviceName"], spec["replicas"]) for spec in pods] == [
        ("my-run-trainer", 1),
        ("my-run-engines", 2),
    ]
    (rank,) = pods[0]["template"]["spec"]["containers"]
    assert "--role trainer --count 8 " in rank["command"][-1]
    assert rank["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_all_nodes_but_the_first_have_environment_workers_beside_engines_and_ranks(folder):
    given = ("--nodes", "3", "--trainer.ranks", "2", "--trainer.remote", "1", "--gpus", "8")
    given = (*given, "--engine.remote", "4", "--environment.remote", "6")
    script = launch("slurm", "run.toml", *given)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    step = [line for line in script.splitlines() if "exec srun" in line][2]
    assert "--ntasks=2 --relative=1 --cpu-bind=none --gpus-per-node=0 --overlap " in step
    assert 'join "$ticket" --role environment --count 3 ' in step
    text = launch("kubernetes", "run.toml", *PODS, *given)
    *_, pods, service = yaml.safe_load_all(text)
    assert service["metadata"]["name"] == pods["spec"]["serviceName"] == "my-run-environments"
    assert pods["spec"]["replicas"] == 2
    (worker,) = pods["spec"]["template"]["spec"]["containers"]
    assert "--role environment --count 3 " in worker["command"][-1]
    assert "resources" not in worker


def test_nodes_may_have_environment_workers_alone(folder):
    script = launch("slurm", "run.toml", "--nodes", "3", "--environment.remote", "8")
    (step,) = [line for line in script.splitlines() if "exec srun" in line]
    assert "--nodes=2 --ntasks=2 --relative=1 " in step
    assert 'join "$ticket" --role environment --count 4 ' in step


FAKES = {
    # The step of the controller ends with 75 after the signal that scancel passes on.
    "srun": "#!/bin/sh\necho $$ > srun.pid\ntrap 'exit 75' TERM\nwhile :; do sleep 0.05; done\n",
    "scancel": '#!/bin/sh\necho "$@" > scancel.txt\nkill -TERM $(cat srun.pid)\n',
    "squeue": "#!/bin/sh\necho $STATE\n",
    "scontrol": '#!/bin/sh\necho "$@" > scontrol.txt\n',
}


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_sbatch_script_requeues_a_preempted_job_and_never_a_cancelled_one(folder, state):
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    launch("slurm", "run.toml")
    path = f"{folder}:{os.environ['PATH']}"
    env = {"PATH": path, "STATE": state, "SLURM_JOB_ID": "31"}
    job = subprocess.Popen(["bash", "written"], cwd=folder, env=env)
    while not (folder / "srun.pid").exists() or not (folder / "srun.pid").read_text():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 75
    assert (folder / "scancel.txt").read_text() == "--signal=TERM 31.0\n"
    requeued = folder / "scontrol.txt"
    assert (requeued.read_text() if requeued.exists() else "") == (
        "requeue 31\n" if state == "RUNNING" else ""
    )


# Kubernetes


def documents(*arguments: str) -> dict[str, dict[str, Any]]:
    """Manifests by kind."""
    text = launch("kubernetes", "run.toml", *PODS, *arguments)
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_job_waits_longer_than_the_grace_period_and_restarts_after_75(folder):
    made = documents("--nodes", "3", "--engine.remote", "4", "--gpus", "engines=2")
    assert list(made) == ["Job", "StatefulSet", "Service"]
    job, engines = made["Job"]["spec"], made["StatefulSet"]["spec"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    first = job["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("Ignore", [75])
    (controller,) = job["template"]["spec"]["containers"]
    (engine,) = engines["template"]["spec"]["containers"]
    assert "resources" not in controller
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert engines["replicas"] == 2
    assert "--count 2 " in engine["command"][-1]
    assert list(documents()) == ["Job"]


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


COUNT, TEXTS = {"type": "integer", "minimum": 0}, {"additionalProperties": {"type": "string"}}
TEMPLATE = {
    **only(metadata={}, spec={}),
    "required": ["spec"],
}  # of a pod
WORKERS = only(
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
# The fields of RayJob v1 in KubeRay's API reference that a manifest may have.
RAYJOB = only(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"required": ["name"]},
    spec=only(
        entrypoint={"type": "string"},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=only(
            headGroupSpec=only(rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)


def test_rayjob_leaves_the_engines_to_ray_and_stops_the_controller_itself(folder):
    made = documents("--kind", "rayjob", "--nodes", "3")["RayJob"]
    jsonschema.validate(made, RAYJOB)
    spec = made["spec"]
    command = "millrace train /workspace/run.toml --auto-resume --cluster.launcher ray"
    assert spec["entrypoint"] == command
    cluster = spec["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert "kill -TERM" in head["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert cluster["workerGroupSpecs"][0]["replicas"] == 2
    alone = documents("--kind", "rayjob")["RayJob"]["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in alone


class Pods:
    """Runs the commands of pods on this machine, with a project in place of the volume."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.started: list[subprocess.Popen[str]] = []
        command = project / "bin" / "millrace"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m millrace.cli.main "$@"\n')
        command.chmod(0o755)

    def start(self, document: dict[str, Any]) -> subprocess.Popen[str]:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        command = [w.replace("/workspace", str(self.project)) for w in container["command"]]
        path = f"{self.project / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": str(REPOSITORY / "src"), "POD_IP": "127.0.0.1"}
        pipe = subprocess.PIPE
        pod = subprocess.Popen(command, cwd=self.project, env=env, stderr=pipe, text=True)
        self.started.append(pod)
        return pod


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    project = make_project(tmp_path, trainer={"steps": 30}, engine={"count": 0, "remote": 1})
    monkeypatch.chdir(project)
    pods = Pods(project)
    yield pods
    for pod in pods.started:
        pod.kill()
        pod.communicate()


@pytest.mark.slow
def test_commands_of_pods_train_and_resume_after_sigterm(pods: Pods):
    made = documents("--nodes", "2")
    controller, engine = pods.start(made["Job"]), pods.start(made["StatefulSet"])
    metrics = pods.project / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert controller.poll() is None, controller.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (pods.project / "run.ticket").stat().st_mode & 0o777 == 0o600
    controller.send_signal(signal.SIGTERM)
    assert controller.wait(60) == 75
    assert engine.wait(60) == 0
    done = steps_in(metrics)
    assert (pods.project / "run" / "checkpoints" / f"step_{done[-1]}").is_dir()
    controller, engine = pods.start(made["Job"]), pods.start(made["StatefulSet"])
    assert controller.wait(90) == 0
    assert steps_in(metrics) == list(range(1, 31))
