"""Kills processes of a run at random moments, and resumes the run when its controller was killed.

Promise: the same seed gives the same roles, signals and pauses; the moments depend on the machine.
Each kill records which process was alive before and when it was gone. A kill waits until some steps
have been completed since the last one, so that the run progresses. A share of early kills does not
wait, and hits the run while killed processes restart.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from millrace.bench.faults.target_run import (
    RunChecker,
    TargetProcess,
    TargetRun,
    gone_after_s,
    is_alive,
    send_signal,
)

CONTROLLER = "controller"
ROLES = ("engine", "scorer", "trainer", CONTROLLER)
STOP_SHARE = 0.15  # share of workers that are stopped (SIGSTOP) instead of killed
EARLY_SHARE = 0.15  # share of kills within EARLY_S of the last one, or at the next step
EARLY_S = 12.0
PAUSE_STEPS = 2.0  # longest pause after the step that a kill waits for, in steps
LAST_STEP = 0.8  # share of the steps after which no kill is planned, so that none comes too late
KILL_TIMEOUT_S = 10.0
HANG_TIMEOUT_S = 240.0  # longer than target_run.toml lets a worker hang
HANG_STEPS = 40  # after this many steps beside a hanging worker, the next kill follows
STALL_S = 600.0
LOOK_S = 0.05


class TargetRunFailed(Exception):
    """The run under test failed or makes no progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillPlan:
    role: str
    signal: signal.Signals
    after_step: int | None  # None = early
    pause: float  # share of the longest pause, from 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    at_s: float  # on the monotonic clock
    role: str
    name: str
    pid: int
    signal: str
    step: int  # the last step completed before the kill
    gone_after_s: float | None  # None = the process survived


def plans(num_kills: int, *, steps: int, seed: int) -> Iterator[KillPlan]:
    """Each role equally often, spread evenly over the steps."""
    rng = random.Random(seed)
    roles = [ROLES[i % len(ROLES)] for i in range(num_kills)]
    rng.shuffle(roles)
    workers = [i for i, role in enumerate(roles) if role != CONTROLLER]
    stopped = set(rng.sample(workers, round(STOP_SHARE * len(workers))))
    for i, role in enumerate(roles):
        is_early = rng.random() < EARLY_SHARE
        yield KillPlan(
            role=role,
            signal=signal.SIGSTOP if i in stopped else signal.SIGKILL,
            after_step=None if is_early else int(LAST_STEP * steps * i / num_kills),
            pause=rng.random(),
        )


@dataclass(eq=False)
class FaultInjector:
    _target: TargetRun
    _checker: RunChecker
    log: Callable[[str], None] = print
    kills: list[Kill] = field(default_factory=list[Kill])
    # By index in kills, until the run notices.
    _hanging: dict[int, TargetProcess] = field(default_factory=dict[int, TargetProcess])

    def inject(self, num_kills: int, *, step_s: float, seed: int) -> None:
        """Kill processes until the run ends; raises TargetRunFailed if it does not. `step_s`: of an
        undisturbed run."""
        for plan in plans(num_kills, steps=self._target.steps, seed=seed):
            if self._wait(plan, step_s=step_s):
                self._execute(plan)
        self._wait_until(lambda: False, what="the end of the run")

    def _wait(self, plan: KillPlan, *, step_s: float) -> bool:
        """Wait for the moment of the kill; False = the run has ended."""
        checker, begun = self._checker, self._checker.step
        is_early, after_step = plan.after_step is None, plan.after_step or 0
        if not self._wait_until(lambda: checker.step >= after_step, what=f"step {after_step}"):
            return False
        pause_s = plan.pause * (EARLY_S if is_early else PAUSE_STEPS * step_s)
        until_s = time.monotonic() + pause_s
        return self._wait_until(
            lambda: time.monotonic() >= until_s or (is_early and checker.step > begun),
            what="a pause",
        )

    def _execute(self, plan: KillPlan) -> None:
        """Signal a process of that role as soon as there is one, unless the run ends first."""

        def find() -> bool:
            seen = self._checker.steps_seen
            has_begun = bool(seen) and seen[-1].at_s > self._target.started_s
            if plan.signal == signal.SIGSTOP and not has_begun:
                return False  # a worker that hangs during start-up ends the run, by design
            found = [each for each in self._target.live_processes() if each.role == plan.role]
            return any(self._send_signal(process, plan.signal) for process in found)

        self._wait_until(find, what=f"a {plan.role}")

    def _send_signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        """False if the process was gone already."""
        self._checker.look()
        at_s, step = time.monotonic(), self._checker.step
        if process in self._hanging.values() or not send_signal(process, number):
            return False
        if number == signal.SIGKILL:
            gone_s = gone_after_s(process, timeout_s=KILL_TIMEOUT_S)
        else:
            gone_s = self._wait_until_noticed(process)
            if gone_s is None:
                self._hanging[len(self.kills)] = process
        self.kills.append(
            Kill(
                at_s=at_s,
                role=process.role,
                name=process.name,
                pid=process.pid,
                signal=number.name,
                step=step,
                gone_after_s=gone_s,
            )
        )
        after = "still alive" if gone_s is None else f"gone after {gone_s:.2f} s"
        what = f"{len(self.kills):3} {number.name} {process.name} (pid {process.pid})"
        self.log(f"{what} at step {step}: {after}")
        if process.role == CONTROLLER:
            self._checker.look()
            self._target.start()
        return True

    def _wait_until_noticed(self, process: TargetProcess) -> float | None:
        """Wait until the run notices the hanging process and kills it; None = it has not yet."""
        start_s, begun = time.monotonic(), self._checker.step
        while (waited_s := time.monotonic() - start_s) < HANG_TIMEOUT_S:
            self._checker.look()
            if gone_after_s(process, timeout_s=LOOK_S) is not None:
                return waited_s
            if self._target.exit_code is not None or self._checker.step > begun + HANG_STEPS:
                break
        return None

    def _update_hanging(self) -> None:
        for index, process in list(self._hanging.items()):
            if not is_alive(process):
                kill = self.kills[index]
                self.kills[index] = replace(kill, gone_after_s=time.monotonic() - kill.at_s)
                del self._hanging[index]

    def _wait_until(self, is_due: Callable[[], bool], *, what: str) -> bool:
        """Wait until due; False if the run ends first. Raises TargetRunFailed if it fails or
        stalls."""
        moved_s, step = time.monotonic(), self._checker.step
        while True:
            code = self._target.exit_code
            self._checker.look()
            self._update_hanging()
            if code == 0:
                return False
            if code is not None:
                raise self._failed(f"The run ended with exit code {code}.")
            if is_due():
                return True
            if self._checker.step > step:
                moved_s, step = time.monotonic(), self._checker.step
            if time.monotonic() - moved_s > STALL_S:
                waited = f"for {STALL_S:.0f} s while waiting for {what}"
                raise self._failed(f"The run completed no step {waited}.")
            time.sleep(LOOK_S)

    def _failed(self, what: str) -> TargetRunFailed:
        lines = self._target.console.read_text(errors="replace").splitlines()
        return TargetRunFailed("\n".join([f"{what} The end of its output:", *lines[-20:]]))
