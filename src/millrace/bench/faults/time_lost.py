"""Where the extra time of a run with faults went.

A gap between two steps that is much longer than usual is attributed to the last kill before its
end, if that kill is recent: the effects of a kill show within the steps that were generated or
buffered by then. The time that is left over stays unexplained and measures the account's quality.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    redo_s: float = 0.0  # part of it, from the first repeated step to the first new one


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    wall_s: float
    undisturbed_s: float
    by_role: dict[str, TimeLoss]
    rest_s: float  # time that neither the undisturbed run nor a kill explains


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
    times = [began_s, *(seen.at_s for seen in new), ended_s]
    usual = [pace.start_s, *([pace.step_s] * (len(new) - 1)), pace.end_s]
    steps = [0, *(seen.step for seen in new)]  # the last step before each gap
    for (begin_s, end_s), usual_s, step in zip(pairwise(times), usual, steps, strict=False):
        extra_s = end_s - begin_s - usual_s
        kill = next((kill for kill in reversed(kills) if kill.at_s < end_s), None)
        if extra_s <= LONG_STEPS * pace.step_s or not kill or step - kill.step > NEAR_STEPS:
            continue
        again = [s.at_s for s in steps_seen if not s.is_new and begin_s <= s.at_s <= end_s]
        by_role[kill.role].seconds += extra_s
        by_role[kill.role].redo_s += end_s - again[0] if again else 0.0
    wall_s = ended_s - began_s
    return TimeAccount(
        wall_s=wall_s,
        undisturbed_s=pace.wall_s,
        by_role=by_role,
        rest_s=wall_s - pace.wall_s - sum(loss.seconds for loss in by_role.values()),
    )
