"""A run of a tiny project whose processes can be stopped and killed at chosen moments."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from project import Command, make_project, steps_in

from millrace.monitoring.report.summary import read_report

GROUPS_PER_STEP = 2
SETTINGS: dict[str, Any] = {
    "evaluate": {"path": "tasks.jsonl", "max_tasks": 8},
    "sampling": {"max_new_tokens": 60},
    "rollout": {"group_size": 4},
    "buffer": {"max_staleness": 1},
    "checkpoint": {"every_steps": 2},
    "journal": {"partial_every_s": 0.05},
    "supervision": {"max_restarts": 20},
}


class KillableRun:
    def __init__(self, folder: Path, *, steps: int, **sections: dict[str, Any]) -> None:
        trainer = {"steps": steps, "groups_per_step": GROUPS_PER_STEP}
        self.project = make_project(folder, **{**SETTINGS, "trainer": trainer, **sections})
        self.path = folder / "run"
        self.steps = steps
        self._command: Command | None = None
        self.output = ""  # of all commands that have ended

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._command = Command("train", "run.toml", *arguments, folder=self.project, env=env)

    @property
    def controller(self) -> psutil.Process:
        assert self._command is not None
        return psutil.Process(self._command.process.pid)

    @property
    def step(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def worker(self, name: str) -> psutil.Process | None:
        for process in self.controller.children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:  # it has just ended
                continue
            if "--name" in command and command[command.index("--name") + 1].startswith(name):
                return process
        return None

    def until(self, condition: Callable[[], Any], *, every_s: float = 0.02) -> Any:
        """Wait until the condition is true; returns its value. The run must not end before."""
        assert self._command is not None
        deadline = time.monotonic() + 90
        while not (found := condition()):
            assert self._command.process.poll() is None, self._command.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(every_s)
        return found

    def wait_for_standstill(self) -> int:
        """Wait until no step was done for 1.5 s; returns the last step."""
        step, since_s = self.step, time.monotonic()
        while time.monotonic() - since_s < 1.5:
            if self.step != step:
                step, since_s = self.step, time.monotonic()
            time.sleep(0.05)
        return step

    def kill(self) -> None:
        """Kill the controller, and expect all workers to die with it."""
        workers = self.controller.children(recursive=True)
        self.controller.send_signal(signal.SIGKILL)
        assert self.finish() == -signal.SIGKILL
        assert not psutil.wait_procs(workers, timeout=10)[1]

    def finish(self) -> int:
        assert self._command is not None
        code, stdout, stderr = self._command.finish()
        self.output += stdout + stderr
        return code

    def summary(self) -> dict[str, Any]:
        """Wait for the end of the run, check that nothing is lost, and return summary.json."""
        code = self.finish()
        assert code == 0, self.output
        assert steps_in(self.path / "metrics.jsonl") == list(range(1, self.steps + 1))
        report = read_report(self.path)
        assert report.check() == []
        assert len(report.closed["trained"]) == GROUPS_PER_STEP * self.steps
        assert self._command is not None
        assert list(self._command.temp.glob("millrace-*")) == []
        return json.loads((self.path / "summary.json").read_text())

    def close(self) -> None:
        if self._command is not None:
            self._command.process.kill()
            self._command.process.communicate()
