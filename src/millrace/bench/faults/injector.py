"""Kills processes of a run at random moments, and starts the run again when that ended it.

Promise: the same seed draws the same roles, signals and pauses; at which moment of the run they
fall is up to the machine. Each kill says who was alive before and when it was gone. The run gets
on: a kill waits until some steps are done since the last, but for a share of hasty ones, which
strike while those who were killed are coming up.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from millrace.bench.faults.checker import RunChecker
from millrace.bench.faults.processes import TargetProcess, gone_after_s, is_alive, strike
from millrace.bench.faults.subject import Subject

CONTROLLER = "controller"
ROLES = ("engine", "scorer", "trainer", CONTROLLER)
STOP_SHARE = 0.15  # of workers: they are stopped and not killed
HASTY_SHARE = 0.15  # strike within HASTY_S of the last, or when a step is done
HASTY_S = 12.0
PAUSE_STEPS = 2.0  # at most, beyond the step that a kill waits for
LAST_STEP = 0.8  # of all, that a kill waits for: the run shall not be over before
KILL_TIMEOUT_S = 10.0
HANG_TIMEOUT_S = 240.0  # more than all that settings_of() allows a worker to hang
HANG_STEPS = 40  # done beside a worker that hangs: then others are killed meanwhile
STALL_S = 600.0
LOOK_S = 0.05


class Stuck(Exception):
    """The run does not get on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillPlan:
    role: str
    signal: signal.Signals
    after_step: int | None  # None = hasty
    pause: float  # of the longest, from 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    at_s: float  # on the monotonic clock
    role: str
    name: str
    pid: int
    signal: str
    step: int  # the last one done then
    gone_after_s: float | None  # None = it was still alive


def plans(num_kills: int, *, steps: int, seed: int) -> Iterator[KillPlan]:
    """Each role equally often, evenly over the steps."""
    rng = random.Random(seed)
    roles = [ROLES[i % len(ROLES)] for i in range(num_kills)]
    rng.shuffle(roles)
    workers = [i for i, role in enumerate(roles) if role != CONTROLLER]
    stopped = set(rng.sample(workers, round(STOP_SHARE * len(workers))))
    for i, role in enumerate(roles):
        is_hasty = rng.random() < HASTY_SHARE
        yield KillPlan(
            role=role,
            signal=signal.SIGSTOP if i in stopped else signal.SIGKILL,
            after_step=None if is_hasty else int(LAST_STEP * steps * i / num_kills),
            pause=rng.random(),
        )


class FaultInjector:
    def __init__(
        self, subject: Subject, witness: RunChecker, *, tell: Callable[[str], None] = print
    ) -> None:
        self._subject = subject
        self._witness = witness
        self._tell = tell
        self.kills: list[Kill] = []
        self._hanging: dict[int, TargetProcess] = {}  # by place in kills, while nobody has noticed
        self.num_missed = 0  # the run ended before they could strike

    def torment(self, num_kills: int, *, step_s: float, seed: int) -> None:
        """Until the run has finished; raises Stuck if it does not. `step_s`: how long a step takes
        when nobody disturbs it."""
        for plan in plans(num_kills, steps=self._subject.steps, seed=seed):
            if not self._wait(plan, step_s=step_s) or not self._carry_out(plan):
                self.num_missed += 1
        self._watch(lambda: False, what="its end")

    def _wait(self, plan: KillPlan, *, step_s: float) -> bool:
        """Until its moment has come; False = the run has ended."""
        after_step, begun = plan.after_step, self._witness.step
        if after_step is None:
            until_s = time.monotonic() + plan.pause * HASTY_S
            return self._watch(
                lambda: time.monotonic() >= until_s or self._witness.step > begun, what="a step"
            )
        if not self._watch(lambda: self._witness.step >= after_step, what=f"step {after_step}"):
            return False
        until_s = time.monotonic() + plan.pause * PAUSE_STEPS * step_s
        return self._watch(lambda: time.monotonic() >= until_s, what="a pause")

    def _carry_out(self, plan: KillPlan) -> bool:
        """False = the run ended before."""

        def find() -> bool:
            if plan.signal == signal.SIGSTOP and not self._has_begun():
                return False  # one that hangs while the run starts ends it, as it should
            for victim in self._subject.victims():
                if victim.role == plan.role and self._strike(victim, plan.signal):
                    return True
            return False

        return self._watch(find, what=f"a {plan.role}")

    def _has_begun(self) -> bool:
        """It has done a step since it was started."""
        sightings = self._witness.sightings
        return bool(sightings) and sightings[-1].at_s > self._subject.started_s

    def _strike(self, victim: TargetProcess, number: signal.Signals) -> bool:
        """False if it was gone before."""
        self._witness.look()
        at_s, step = time.monotonic(), self._witness.step
        if victim in self._hanging.values() or not strike(victim, number):
            return False
        is_stop = number == signal.SIGSTOP
        gone_s = (
            self._gone_when_noticed(victim)
            if is_stop
            else gone_after_s(victim, timeout_s=KILL_TIMEOUT_S)
        )
        kill = Kill(
            at_s=at_s,
            role=victim.role,
            name=victim.name,
            pid=victim.pid,
            signal=number.name,
            step=step,
            gone_after_s=gone_s,
        )
        if is_stop and gone_s is None:
            self._hanging[len(self.kills)] = victim
        self.kills.append(kill)
        after = "still alive" if gone_s is None else f"gone after {gone_s:.2f} s"
        what = f"{len(self.kills):3} {number.name} {victim.name} (pid {victim.pid})"
        self._tell(f"{what} at step {step}: {after}")
        if victim.role == CONTROLLER:
            self._go_on()
        return True

    def _gone_when_noticed(self, victim: TargetProcess) -> float | None:
        """It is for the run to notice that it hangs, and to end it; None = it has not yet."""
        start_s, begun = time.monotonic(), self._witness.step
        while (waited_s := time.monotonic() - start_s) < HANG_TIMEOUT_S:
            self._witness.look()
            if gone_after_s(victim, timeout_s=LOOK_S) is not None:
                return waited_s
            if self._subject.exit_code is not None or self._witness.step > begun + HANG_STEPS:
                return None
        return None

    def _look_after_hanging(self) -> None:
        for index, victim in list(self._hanging.items()):
            if not is_alive(victim):
                kill = self.kills[index]
                self.kills[index] = replace(kill, gone_after_s=time.monotonic() - kill.at_s)
                del self._hanging[index]

    def _go_on(self) -> None:
        self._witness.look()
        self._subject.start()

    def _watch(self, is_due: Callable[[], bool], *, what: str) -> bool:
        """Wait for it; False if the run ends meanwhile. Raises Stuck if it fails or hangs."""
        moved_s, step = time.monotonic(), self._witness.step
        while True:
            code = self._subject.exit_code
            self._witness.look()
            self._look_after_hanging()
            if code == 0:
                return False
            if code is not None:
                raise Stuck(
                    f"The run ended with exit code {code}. The end of what it said:\n"
                    f"{self._subject.last_words}"
                )
            if is_due():
                return True
            if self._witness.step > step:
                moved_s, step = time.monotonic(), self._witness.step
            if time.monotonic() - moved_s > STALL_S:
                raise Stuck(
                    f"No step was done for {STALL_S:.0f} s, waiting for {what}. The end of what the"
                    f" run said:\n{self._subject.last_words}"
                )
            time.sleep(LOOK_S)
