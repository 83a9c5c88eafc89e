"""Runs that resume after all their processes were killed at once."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from project import Command, make_project, steps_in

from millrace.core.errors import JournalError
from millrace.journal import Ledger, read_journal
from millrace.monitoring.files.episodes import read_lifecycle
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.samples import read_samples
from millrace.monitoring.report.summary import read_report
from millrace.monitoring.run_dir import RunDir

STEPS, GROUPS = 14, 4
# tests/e2e/test_processes.py has one kill in the default run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def settings_of(**more) -> dict:
    return {"trainer": {"steps": STEPS}, "checkpoint": {"every_steps": 4}, **more}


class KillableGroup:
    """A run in its own process group."""

    def __init__(self, project: Path, *arguments: str) -> None:
        self.journal = project / "run" / "journal"
        self.command = Command("train", "run.toml", *arguments, folder=project)
        self.group = os.getpgid(self.command.process.pid)

    def kill_when(self, is_time: Callable[[Ledger], bool]) -> Ledger:
        """Kill all processes with SIGKILL at the right time; returns the ledger on disk."""
        deadline = time.monotonic() + 240
        while (ledger := self._ledger()) is None or not is_time(ledger):
            assert self.command.process.poll() is None, self.command.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(self.group, signal.SIGKILL)
        self.command.process.communicate()
        after = self._ledger()
        assert after is not None
        return after

    def _ledger(self) -> Ledger | None:
        try:
            history = read_journal(self.journal)
        except JournalError:  # it is just being written
            return None
        return None if history is None else history.ledger


def is_between_steps(ledger: Ledger) -> bool:
    return 6 <= ledger.last_step < STEPS and not ledger.training


def is_in_a_step(ledger: Ledger) -> bool:
    return 6 <= ledger.last_step < STEPS and bool(ledger.training)


def has_no_checkpoint_yet(ledger: Ledger) -> bool:
    return 2 <= ledger.last_step <= 3


@pytest.fixture
def project(tmp_path) -> Path:
    return make_project(tmp_path, **settings_of())


@pytest.mark.parametrize("is_time", [is_between_steps, is_in_a_step, has_no_checkpoint_yet])
def test_killed_run_resumes_with_the_same_steps_and_a_consistent_ledger(project, is_time):
    before = KillableGroup(project).kill_when(is_time)
    rows = {row["step"]: row for row in read_metrics(project / "run" / "metrics.jsonl")}

    code, _, stderr = Command("train", "run.toml", "--resume", folder=project).finish(timeout_s=240)
    assert code == 0, stderr
    metrics = project / "run" / "metrics.jsonl"
    assert steps_in(metrics) == list(range(1, STEPS + 1))
    report = read_report(project / "run")
    assert report.check() == []
    assert len(report.closed["trained"]) == STEPS * GROUPS
    for row in read_metrics(metrics):
        for name in ("loss", "grad_norm", "reward/mean"):  # repeated with the same groups
            assert row["step"] not in rows or row[name] == rows[row["step"]][name]
    run_dir, trained = RunDir(project / "run"), report.closed["trained"]
    lives = [life for step in range(1, STEPS + 1) if (life := read_lifecycle(run_dir, step))]
    assert len(lives) >= STEPS - 1  # a kill may cost the files of one step
    numbers = [group.number for life in lives for group in life.groups]  # times survive the kill
    assert len(numbers) == len(set(numbers)) == len(lives) * GROUPS
    assert set(numbers) <= set(trained)
    ends = [life.end_s for life in lives]
    assert ends == sorted(ends)
    assert all(read_samples(run_dir, life.step) for life in lives)
    for version, step in before.steps.items():
        now = report.ledger.steps.get(version)
        assert now is None or now.numbers == step.numbers


def test_run_survives_repeated_kills(project):
    done = 0
    for kill in range(3):
        arguments = ("--resume",) if kill else ()
        ledger = KillableGroup(project, *arguments).kill_when(
            lambda ledger, done=done: ledger.last_step > done + 2
        )
        done = ledger.last_step
    code, stdout, stderr = Command("train", "run.toml", "--resume", folder=project).finish(
        timeout_s=240
    )
    assert code == 0, stderr
    report = read_report(project / "run")
    assert report.check() == []
    assert len(report.closed["trained"]) == STEPS * GROUPS
    assert steps_in(project / "run" / "metrics.jsonl") == list(range(1, STEPS + 1))
    code, stdout, _ = Command("inspect", "run", "--ledger", folder=project).finish()
    assert code == 0
    assert f"{STEPS * GROUPS}" in stdout


def test_large_journal_forces_checkpoints_and_shrinks(tmp_path):
    journal = {"max_bytes": 200_000}
    project = make_project(tmp_path, **settings_of(checkpoint={"every_steps": 0}, journal=journal))
    code, _, stderr = Command("train", "run.toml", folder=project).finish(timeout_s=240)
    assert code == 0, stderr
    made = [path.name for path in (project / "run" / "checkpoints").iterdir()]
    assert len(made) > 1
    # The database and its log, each in pages of 32 KiB.
    assert sum(path.stat().st_size for path in (project / "run" / "journal").iterdir()) < 500_000
    assert len(read_report(project / "run").closed["trained"]) == STEPS * GROUPS
