"""Where the extra time of a run with faults went.

A gap between two steps that is much longer than usual is attributed to the last kill before its
end, if that kill is recent: the effects of a kill show within the steps that were generated or
buffered by then. The time that is left over stays unexplained and measures the account's quality.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.bench.faults.checker import StepSeen
from millrace.bench.faults.injector import Kill
from millrace.bench.faults.target_run import MAX_STALENESS

LONG_STEPS = 2.0  # a gap is long if it exceeds the usual time by this many steps
NEAR_STEPS = MAX_STALENESS + 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Timing of the run without faults."""

    wall_s: float
    start_s: float  # from the start to the first step
    step_s: float  # mean time from one step to the next
    end_s: float  # from the last step to the end

    @classmethod
    def of(cls, steps_seen: Sequence[StepSeen], *, began_s: float, ended_s: float) -> "Pace":
        first, last = steps_seen[0], steps_seen[-1]
        return cls(
            wall_s=ended_s - began_s,
            start_s=first.at_s - began_s,
            step_s=(last.at_s - first.at_s) / max(1, len(steps_seen) - 1),
            end_s=ended_s - last.at_s,
        )


@dataclass(kw_only=True, slots=True)
class TimeLoss:
    """Time lost to the kills of one role."""

    num_kills: int = 0
    seconds: float = 0.0
    redo_s: float = 0.0  # part of it spent on repeated steps


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    wall_s: float
    undisturbed_s: float
    by_role: dict[str, TimeLoss] = field(default_factory=dict[str, TimeLoss])

    @property
    def rest_s(self) -> float:
        """Time that neither the undisturbed run nor a kill explains."""
        lost_s = sum(loss.seconds for loss in self.by_role.values())
        return self.wall_s - self.undisturbed_s - lost_s


def account(
    steps_seen: Sequence[StepSeen],
    kills: Sequence[Kill],
    *,
    pace: Pace,
    began_s: float,
    ended_s: float,
) -> TimeAccount:
    by_role: dict[str, TimeLoss] = {}
    for kill in kills:
        by_role.setdefault(kill.role, TimeLoss()).num_kills += 1
    new = [seen for seen in steps_seen if seen.is_new]
    gaps = _gaps(new, pace=pace, began_s=began_s, ended_s=ended_s)
    times = [kill.at_s for kill in kills]
    for begin_s, end_s, usual_s, step in gaps:
        index = bisect.bisect_left(times, end_s) - 1
        is_long = end_s - begin_s - usual_s > LONG_STEPS * pace.step_s
        if not is_long or index < 0 or step - kills[index].step > NEAR_STEPS:
            continue
        loss = by_role[kills[index].role]
        loss.seconds += end_s - begin_s - usual_s
        loss.redo_s += _redo_s(steps_seen, begin_s=begin_s, end_s=end_s)
    return TimeAccount(wall_s=ended_s - began_s, undisturbed_s=pace.wall_s, by_role=by_role)


def _gaps(
    new: Sequence[StepSeen], *, pace: Pace, began_s: float, ended_s: float
) -> list[tuple[float, float, float, int]]:
    """Begin, end, usual duration, and the last step completed before the gap."""
    times = [began_s, *(seen.at_s for seen in new), ended_s]
    usual = [pace.start_s, *([pace.step_s] * (len(new) - 1)), pace.end_s]
    steps = [0, *(seen.step for seen in new)]
    return list(zip(times, times[1:], usual, steps, strict=False))


def _redo_s(steps_seen: Sequence[StepSeen], *, begin_s: float, end_s: float) -> float:
    """Seconds from the first repeated step to the first new one."""
    again = [s.at_s for s in steps_seen if not s.is_new and begin_s <= s.at_s <= end_s]
    return end_s - again[0] if again else 0.0
