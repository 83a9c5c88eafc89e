"""Workers that are killed in the middle of a run, which goes on as if nothing had happened."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in

SETTINGS = {
    "sampling": {"max_new_tokens": 150},
    "supervision": {"report_s": 0.05, "backoff_s": 0.05},
    "weights": {"payload": "delta"},
}


class Run(Command):
    def __init__(self, project: Path) -> None:
        super().__init__("train", "run.toml", folder=project)
        self.path = project / "run"

    def wait_for_step(self, step: int) -> None:
        self.wait_for(self.path / "metrics.jsonl", lines=step)

    def worker(self, name: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            command = process.cmdline()
            if name in command and "--name" in command:
                return process
        raise AssertionError(f"no {name}")

    def assert_finished(self, *, steps: int) -> dict:
        code, _, stderr = self.finish()
        assert code == 0, stderr
        assert steps_in(self.path / "metrics.jsonl") == list(range(1, steps + 1))
        return json.loads((self.path / "summary.json").read_text())


@pytest.fixture
def start(tmp_path):
    runs: list[Run] = []

    def start(**sections) -> Run:
        runs.append(Run(make_project(tmp_path, **{**SETTINGS, **sections})))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_outlives_its_engine_and_its_trainer_and_keeps_what_was_sampled(start):
    run = start(trainer={"steps": 12, "groups_per_step": 4}, checkpoint={"every_steps": 3})
    run.wait_for_step(4)
    engine, trainer = run.worker("engine-0"), run.worker("trainer")
    engine.send_signal(signal.SIGKILL)
    run.wait_for_step(7)
    assert run.worker("engine-0").pid != engine.pid
    trainer.send_signal(signal.SIGKILL)
    summary = run.assert_finished(steps=12)
    assert summary["worker_restarts"] == {"engine-0": 1, "trainer": 1}
    assert summary["sequences_continued"] > 0
    assert Path(summary["checkpoint"]).name == "step_12"
