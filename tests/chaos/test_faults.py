"""Fault injection without a run: the injector, the checker and the time account."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.bench.chaos import RunTimes, account, check_account, check_accuracy, check_kills
from millrace.bench.faults.injector import CONTROLLER, HANG_STEPS, ROLES, FaultInjector, Kill, plans
from millrace.bench.faults.target_run import (
    RunChecker,
    StepSeen,
    TargetProcess,
    gone_after_s,
    is_alive,
    send_signal,
    workers_of,
)
from millrace.monitoring.run_dir import RunDir

UNDISTURBED = RunTimes(wall_s=15.0, start_s=4.0, step_s=1.0, end_s=2.0)  # ten steps


def make_kill(*, at_s: float, step: int, role: str = "engine", gone: float | None = 0.1) -> Kill:
    return Kill(
        at_s=at_s,
        role=role,
        name=f"{role}-0",
        pid=1,
        signal="SIGKILL",
        step=step,
        gone_after_s=gone,
    )


def steps_seen_at(*times: float) -> list[StepSeen]:
    return [StepSeen(at_s=at_s, step=i + 1, is_new=True) for i, at_s in enumerate(times)]


def observed(steps_seen: list[StepSeen], *, ended_s: float) -> RunChecker:
    """The checker of a run that began at second 0."""
    checker = RunChecker(RunDir("not written"))
    checker.steps_seen, checker.began_s, checker.ended_s = steps_seen, 0.0, ended_s
    return checker


def test_kills_are_spread_evenly_over_roles_and_steps():
    drawn = list(plans(200, steps=400, seed=1))
    assert {role: sum(plan.role == role for plan in drawn) for role in ROLES} == dict.fromkeys(
        ROLES, 50
    )
    waiting = [plan.after_step for plan in drawn if plan.after_step is not None]
    assert waiting == sorted(waiting)
    assert 310 < waiting[-1] <= 320
    assert 10 < sum(plan.after_step is None for plan in drawn) < 60
    stopped = [plan.role for plan in drawn if plan.signal == signal.SIGSTOP]
    assert len(stopped) == 22
    assert set(stopped) == {"engine", "scorer", "trainer"}
    assert CONTROLLER not in stopped
    assert drawn == list(plans(200, steps=400, seed=1))


@pytest.fixture
def process() -> Iterator[TargetProcess]:
    """A process with the command line of a worker."""
    command = "import sys, time; time.sleep(60)"
    arguments = ["-m", "millrace.inference.worker", "--name", "engine-7", "--address", "a"]
    started = subprocess.Popen([sys.executable, "-c", command, *arguments, "--parent", "999999999"])
    try:
        (found,) = workers_of(999999999)
        assert (found.role, found.name, found.pid) == ("engine", "engine-7", started.pid)
        yield found
    finally:
        started.kill()
        started.wait()


def test_only_workers_of_the_controller_are_found_and_kills_are_verified(process):
    assert workers_of(999999998) == []
    assert gone_after_s(process, timeout_s=0.1) is None
    assert send_signal(process, signal.SIGKILL)
    assert gone_after_s(process, timeout_s=10) is not None  # as a zombie
    assert not is_alive(process)
    assert not send_signal(process, signal.SIGKILL)


class FastRun:
    """A run and its checker in one. Each look finds ten more steps."""

    step, exit_code = 0, None

    def look(self) -> None:
        self.step += 10


def test_next_kill_follows_while_a_worker_hangs_if_steps_continue(process):
    run: Any = FastRun()
    injector = FaultInjector(run, run, log=lambda _: None)
    assert injector._send_signal(process, signal.SIGSTOP)
    assert run.step > HANG_STEPS
    assert not injector._send_signal(process, signal.SIGKILL)  # the run must end it
    assert [kill.gone_after_s for kill in injector.kills] == [None]
    injector._update_hanging()
    assert [kill.gone_after_s for kill in injector.kills] == [None]
    os.kill(process.pid, signal.SIGKILL)
    assert gone_after_s(process, timeout_s=10) is not None
    injector._update_hanging()
    assert check_kills(injector.kills, wanted=1).holds


def test_long_gap_is_attributed_to_the_kill_before_it_and_all_seconds_add_up():
    # The engine dies after step 3. Two buffered steps follow, then nothing for 9 more seconds.
    times = (4, 5, 6, 7, 8, 18, 19, 20, 21, 22)
    run = observed(steps_seen_at(*times), ended_s=24.0)
    lost = account(run, [make_kill(at_s=6.5, step=3)], undisturbed=UNDISTURBED)
    assert lost.by_role["engine"].seconds == pytest.approx(9.0)
    assert lost.rest_s == pytest.approx(0.0)
    assert check_account(lost).holds


def test_long_gap_far_from_any_kill_stays_unexplained():
    times = (4, 5, 6, 7, 8, 9, 10, 11, 31, 32)
    run = observed(steps_seen_at(*times), ended_s=34.0)
    lost = account(run, [make_kill(at_s=5.5, step=2)], undisturbed=UNDISTURBED)
    assert lost.by_role["engine"].seconds == 0
    assert lost.rest_s == pytest.approx(19.0)
    assert not check_account(lost).holds


def test_repeated_steps_count_as_redone():
    before, after = steps_seen_at(4, 5, 6), steps_seen_at(4, 5, 6, 22, 23)[3:]
    again = [StepSeen(at_s=18.0, step=2, is_new=False), StepSeen(at_s=20.0, step=3, is_new=False)]
    kill = make_kill(at_s=6.5, step=3, role=CONTROLLER)
    run = observed([*before, *again, *after], ended_s=25.0)
    lost = account(run, [kill], undisturbed=UNDISTURBED)
    loss = lost.by_role[CONTROLLER]
    assert loss.seconds == pytest.approx(15.0)
    assert loss.redo_s == pytest.approx(4.0)


def test_promises_break():
    assert check_kills([make_kill(at_s=1, step=1)], wanted=1).holds
    assert not check_kills([make_kill(at_s=1, step=1)], wanted=2).holds
    assert not check_kills([make_kill(at_s=1, step=1, gone=None)], wanted=1).holds
    assert check_accuracy(0.90, 0.85).holds
    assert not check_accuracy(0.90, 0.70).holds


class FakeRunDir:
    """Writes the files of a run directory, without a run."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self.run_dir.rollouts.mkdir(parents=True)

    def begin(self, kept: int = 0) -> None:
        """Write metrics as a run does that starts or resumes."""
        rows = [json.dumps({"step": step}) + "\n" for step in range(1, kept + 1)]
        fresh = self.run_dir.metrics.with_name("new")
        fresh.write_text("".join(rows))
        fresh.replace(self.run_dir.metrics)

    def step(self, step: int, *groups: int) -> None:
        with self.run_dir.metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        lines = [json.dumps({"group": group}) for group in groups]
        (self.run_dir.rollouts / f"step_{step}.jsonl").write_text("\n".join(lines))


def test_checker_notices_a_repeated_step_with_other_groups(tmp_path):
    fake = FakeRunDir(tmp_path)
    checker = RunChecker(fake.run_dir)
    checker.look()
    fake.begin()
    for step in (1, 2, 3):
        fake.step(step, 10 * step, 10 * step + 1)
        checker.look()
    fake.begin(kept=1)
    checker.look()
    fake.step(2, 20, 99)
    fake.step(3, 30, 31)
    fake.step(4, 40, 41)
    checker.conclude()
    assert [(s.step, s.is_new) for s in checker.steps_seen] == [
        (1, True),
        (2, True),
        (3, True),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert checker.groups[4] == {40, 41}
    (sentence,) = checker.contradictions
    assert sentence.startswith("Step 2 trained on groups [20, 21], and")
