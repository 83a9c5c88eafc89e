"""What is left after success, failure and Ctrl-C: nothing but the run directory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_model import make_tiny_model

RUN = """
run_dir = "run"
model = "model"
[tasks]
path = "tasks.jsonl"
[sampling]
max_new_tokens = 24
[[scorer]]
function = "rewards.py:digits"
[rollout]
group_size = 4
[trainer]
steps = 100000
groups_per_step = 4
[checkpoint]
every_steps = 5
[watch]
progress = "lines"
"""
REWARDS = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]
"""


@pytest.fixture
def project(tmp_path) -> Path:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{n}+1="}) for n in range(50)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tmp_path


class Run:
    """`millrace train` in a process of its own, with a temp dir nobody else writes to."""

    def __init__(self, project: Path, *arguments: str) -> None:
        self.run_dir = project / "run"
        self.temp = project / "tmp"
        self.temp.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace.cli", "train", "run.toml", *arguments],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temp)},
        )
        self.workers: dict[str, psutil.Process] = {}

    def wait_for_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 90
        while not metrics.is_file() or metrics.read_text().count("\n") < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "no step completed"
            time.sleep(0.05)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            command = process.cmdline()
            if "--name" in command:
                self.workers[command[command.index("--name") + 1]] = process
        assert {"engine-0", "trainer", "scorer-0"} <= self.workers.keys()

    def finish(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr

    def assert_nothing_is_left(self) -> None:
        assert not [p for p in self.workers.values() if p.is_running()]
        assert list(self.temp.iterdir()) == []


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


def test_ctrl_c_stops_everything_and_says_where_things_lie(project):
    before = shared_memory()
    run = Run(project)
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGINT)
    code, stderr = run.finish()
    assert code == 130
    assert "--resume goes on from step_" in stderr
    run.assert_nothing_is_left()
    assert shared_memory() <= before


@pytest.mark.parametrize("victim", ["engine-0", "trainer"])
def test_a_killed_worker_ends_the_run_with_a_sentence_and_no_orphans(project, victim):
    before = shared_memory()
    run = Run(project)
    run.wait_for_step(2)
    run.workers[victim].send_signal(signal.SIGKILL)
    code, stderr = run.finish()
    assert code == 1
    assert victim in stderr
    assert "SIGKILL" in stderr
    run.assert_nothing_is_left()
    assert shared_memory() <= before


def test_a_killed_scorer_is_replaced_and_the_run_goes_on(project):
    run = Run(project, "--trainer.steps", "60")
    run.wait_for_step(2)
    run.workers["scorer-0"].send_signal(signal.SIGKILL)
    code, stderr = run.finish()
    assert code == 0, stderr
    run.assert_nothing_is_left()


def test_resume_after_a_kill_of_everything_reaches_the_last_step(project):
    run = Run(project, "--trainer.steps", "30")
    run.wait_for_step(7)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=10)
    psutil.wait_procs(list(run.workers.values()), timeout=10)
    assert not [p for p in run.workers.values() if p.is_running()]
    resumed = Run(project, "--trainer.steps", "30", "--resume")
    code, stderr = resumed.finish()
    assert code == 0, stderr
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--trainer.lerning_rate", "1"], "did you mean 'learning_rate'"),
        (["--trainer.steps", "many"], "'trainer.steps' = 'many'"),
        (["--model.path", "./nowhere"], "Model './nowhere' does not exist"),
        (["--tasks.path", "empty.jsonl"], "is empty"),
        (["--tasks.path", "bad.jsonl"], "line 2 has no 'prompt'"),
        (["--engine.max_context", "3"], "raise engine.max_context"),
        (["--loss.type", "cliped"], "did you mean 'clipped'"),
        (["--loss.hihg", "0.3"], "did you mean 'high'"),
        (["--buffer.capacity", "1"], "buffer.capacity"),
    ],
)
def test_bad_input_is_one_sentence_before_any_worker_starts(project, change, sentence):
    (project / "empty.jsonl").write_text("\n")
    (project / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"question": "1+1="}\n')
    code, stderr = Run(project, *change).finish()
    assert code == 2
    assert sentence in stderr
    assert "Traceback" not in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not (project / "run" / "logs" / "trainer.log").exists()
