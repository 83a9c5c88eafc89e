"""Runs whose ranks and engines are on a Ray cluster; `make test-ray` runs them."""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from project import REPOSITORY, Command, make_project, steps_in

from millrace.cluster.address import free_port
from millrace.run.scaling import ask

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)

PORT = 6399
RAY_COMMAND = [sys.executable, "-m", "ray.scripts.scripts"]
# Ray needs short paths for its sockets. By default it gives its workers a niceness of 15 and kills
# them when the memory is nearly full, and on a busy machine they would hardly start.
RAY = {
    "TMPDIR": "/tmp",
    "RAY_TMPDIR": "/tmp",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
ENVIRONMENT = """
import os


async def play(task, agent):
    assert (os.environ["JUDGE_KEY"], os.environ["RAY_AUTH_TOKEN"]) == ("x", "")
    return float("1" in (await agent.complete(task.prompt)).text)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(
        tmp_path / "controller",
        trainer={"steps": 6},
        optimizer={"learning_rate": 1e-3},
        engine={"count": 1},
        checkpoint={"every_steps": 2},
    )


@contextlib.contextmanager
def started_head(*options: str, **variables: str) -> Iterator[dict[str, str]]:
    """The environment of a command that uses a cluster with four CPUs and a token of its own."""
    folder = tempfile.mkdtemp(prefix="mr", dir="/tmp")  # not the one of other clusters
    own = {
        **RAY,
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    head = subprocess.Popen(  # in a session of its own: `ray stop` would stop other clusters, too
        [*RAY_COMMAND, "start", "--head", "--block", "--num-cpus=4", f"--port={PORT}", *options],
        env={**os.environ, **own, "JUDGE_KEY": "x", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while "raylet" not in " ".join(child.name() for child in children):
            assert head.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
            children = psutil.Process(head.pid).children(recursive=True)
        yield {**own, "RAY_ADDRESS": f"127.0.0.1:{PORT}"}
        children = psutil.Process(head.pid).children(recursive=True)
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        for process in (*children, head):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    with started_head("--include-dashboard=false") as env:
        yield env


class JobServer:
    """A cluster that takes jobs, and the commands `ray job ...`, which run in a folder."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, url: str) -> None:
        self.folder, self.env, self.url = folder, {**os.environ, **env}, url

    def job(self, *arguments: str) -> str:
        """Run `ray job`; returns what it prints."""
        command = [*RAY_COMMAND, "job", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def logs(self, id: str) -> str:
        return self.job("logs", "--address", self.url, id)

    def submit(self, *settings: str, options: Sequence[str] = ()) -> str:
        """The command of docs/how-to/ray.md; `options` are Ray's."""
        guide = (REPOSITORY / "docs/how-to/ray.md").read_text()
        (command,) = re.findall(r"^ray job (submit .*)", guide, re.MULTILINE)
        words = shlex.split(command.replace("http://head:8265", self.url))
        end = words.index("--")
        return self.job(*words[:end], *options, *words[end:], *settings)


@pytest.fixture
def job_server(project: Path) -> Iterator[JobServer]:
    command = project.parent / "bin" / "millrace"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m millrace.cli.main "$@"\n')
    command.chmod(0o755)
    port, agent = free_port("127.0.0.1"), free_port("127.0.0.1")
    options = ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    options += [f"--dashboard-port={port}", f"--dashboard-agent-listen-port={agent}"]
    variables = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY / "src"),
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # between SIGTERM and SIGKILL; 3 by default
    }
    with started_head(*options, **variables) as env:
        deadline = time.monotonic() + 150
        while not (is_open(port) and is_open(agent)):  # the agent starts the jobs
            assert time.monotonic() < deadline, "no dashboard"
            time.sleep(0.2)
        yield JobServer(project, env, url=f"http://127.0.0.1:{port}")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def workers() -> dict[str, psutil.Process]:
    """The worker processes of this machine's Ray actors, by name."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "--heartbeat-timeout" in line:
            found[line[line.index("--name") + 1]] = process
    return found


def ray_processes() -> set[int]:
    processes = psutil.process_iter(["pid", "cmdline"])
    return {p.info["pid"] for p in processes if "ray" in " ".join(p.info["cmdline"] or [])}


def test_run_on_a_cluster_of_its_own_trains_and_leaves_no_process(project):
    before = ray_processes()
    settings = ["--cluster.launcher", "ray", "--engine.count", "1"]
    run = Command("train", "run.toml", *settings, folder=project, env=RAY)
    code, stdout, stderr = run.finish()
    assert code == 0, stdout + stderr
    assert steps_in(project / "run" / "metrics.jsonl") == list(range(1, 7))
    assert (project / "run" / "logs" / "engine-0.log").is_file()
    assert ray_processes() <= before


def test_killed_engine_and_rank_on_an_existing_cluster_are_replaced(project, cluster):
    settings = ["--cluster.launcher", "ray", "--engine.count", "2", "--trainer.ranks", "2"]
    run = Command("train", "run.toml", *settings, folder=project, env=cluster)
    metrics = project / "run" / "metrics.jsonl"
    run.wait_for(metrics, lines=2)
    workers()["engine-1"].kill()
    run.wait_for(metrics, lines=3)
    workers()["trainer-1"].kill()
    code, stdout, stderr = run.finish()
    assert code == 0, stdout + stderr
    assert steps_in(metrics) == list(range(1, 7))
    assert "Worker 'engine-1' was killed by SIGKILL; its log is " in stdout + stderr
    restarts = json.loads((project / "run" / "summary.json").read_text())["restarts"]
    assert restarts == {"engine-1": 1, "trainer": 1}
    assert workers() == {}


def test_environment_workers_are_placed_on_the_cluster_and_replaced(project, cluster):
    (project / "play.py").write_text(ENVIRONMENT)
    settings = ["--cluster.launcher", "ray", "--environment.function", "play.py:play"]
    settings += ["--environment.remote", "2"]
    run = Command("train", "run.toml", *settings, folder=project, env=cluster)
    metrics = project / "run" / "metrics.jsonl"
    run.wait_for(metrics, lines=2)
    workers()["environment-1"].kill()
    code, stdout, stderr = run.finish()
    assert code == 0, stdout + stderr
    assert steps_in(metrics) == list(range(1, 7))
    restarts = json.loads((project / "run" / "summary.json").read_text())["restarts"]
    assert restarts == {"environment-1": 1}
    assert "It is being restarted." in stdout + stderr
    assert workers() == {}


def test_commands_of_a_rayjob_train_and_resume_after_the_head_is_stopped(project, cluster):
    """The entrypoint that KubeRay submits, and what Kubernetes runs before it stops the head."""
    pod = ["--kind", "rayjob", "--image", "millrace:1", "--claim", "work"]
    settings = ["--trainer.steps", "30"]
    written = Command("launch", "kubernetes", "run.toml", *pod, *settings, folder=project)
    manifest = yaml.safe_load(written.finish()[1].replace("/workspace", str(project)))["spec"]
    program, *arguments = shlex.split(manifest["entrypoint"])
    assert program == "millrace"
    (head,) = manifest["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    metrics = project / "run" / "metrics.jsonl"
    first = Command(*arguments, folder=project, env=cluster)
    first.wait_for(metrics, lines=2)
    stopping = subprocess.Popen(head["lifecycle"]["preStop"]["exec"]["command"])
    code, stdout, stderr = first.finish()
    assert code == 75, stdout + stderr
    assert stopping.wait(10) == 0
    done = steps_in(metrics)
    assert (project / "run" / "checkpoints" / f"step_{done[-1]}").is_dir()
    assert workers() == {}
    code, stdout, stderr = Command(*arguments, folder=project, env=cluster).finish()
    assert code == 0, stdout + stderr
    assert steps_in(metrics) == list(range(1, 31))


@pytest.mark.timeout(500)
def test_submitted_job_trains_saves_at_ray_job_stop_and_resumes(project, job_server):
    """It runs in a copy of the working directory, so run_dir is elsewhere."""
    run_dir = project.parent / "run"
    metrics = run_dir / "metrics.jsonl"
    settings = ["--run_dir", str(run_dir), "--auto-resume"]
    options = ["--submission-id", "first", "--no-wait"]
    job_server.submit(*settings, "--trainer.steps", "100000", options=options)
    deadline = time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline, job_server.logs("first")
        time.sleep(0.2)
    job_server.job("stop", "--address", job_server.url, "first")
    assert "stopped by SIGTERM" in job_server.logs("first")
    done = steps_in(metrics)
    assert (run_dir / "checkpoints" / f"step_{done[-1]}").is_dir()
    assert workers() == {}
    output = job_server.submit(*settings, "--trainer.steps", str(done[-1] + 4))
    assert "succeeded" in output
    assert steps_in(metrics) == list(range(1, done[-1] + 5))
    assert not (project / "run").exists()
    assert workers() == {}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--cluster.threads", "500"], "CPUs free, too few for trainer (500 CPUs); lower"),
        (
            ["--placement.trainer", "cuda", "--placement.engines", "cuda"],
            "Ray has 0 of 0 GPUs free, too few for trainer (1 CPU and 1 GPU); lower engine.count",
        ),
    ],
    ids=["CPUs", "GPUs"],
)
def test_too_few_resources_are_one_sentence_and_leave_no_process(project, settings, sentence):
    before = ray_processes()
    env = {**RAY, "CUDA_VISIBLE_DEVICES": ""}  # no GPU, whatever the machine has
    settings = ["--cluster.launcher", "ray", *settings]
    run = Command("train", "run.toml", *settings, folder=project, env=env)
    code, _, stderr = run.finish()
    assert code == 2
    assert sentence in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert ray_processes() <= before


def wait_for_engines(run: Command, run_dir: Path, names: list[str]) -> None:
    deadline = time.monotonic() + 120
    while ask(run_dir) != names:
        assert run.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.timeout(500)
def test_autoscaling_adds_an_engine_on_the_cluster_and_removes_it(project, cluster):
    """The policy decides every 30 s."""
    settings = ["--trainer.steps", "100000", "--sampling.max_new_tokens", "200"]
    settings += ["--engine.max_count", "2"]
    run = Command(
        "train", "run.toml", "--cluster.launcher", "ray", *settings, folder=project, env=cluster
    )
    try:
        run.wait_for(project / "run" / "metrics.jsonl", lines=1)
        wait_for_engines(run, project / "run", ["engine-0", "engine-1"])
        trainer = workers()["trainer"]
        trainer.suspend()  # whole batches wait for it
        wait_for_engines(run, project / "run", ["engine-0"])
        trainer.resume()
        assert ask(project / "run", add=1) == ["engine-0", "engine-2"]
        assert ask(project / "run", remove=("engine-0",)) == ["engine-2"]
        done = len(steps_in(project / "run" / "metrics.jsonl"))
        run.wait_for(project / "run" / "metrics.jsonl", lines=done + 4)  # the added engine alone
    finally:
        run.process.send_signal(signal.SIGINT)
        code, stdout, stderr = run.finish()
        print(stdout, stderr)  # shown if it fails
    assert code == 130
    assert "The trainer waited for " in stdout
    assert "Whole batches waited for the trainer: removing engine-1." in stdout
    assert workers() == {}
