"""Where the time went that a tormented run took longer.

A gap between two steps that is far longer than usual is put down to the last kill before its end,
if that is near: nothing that a kill took away can be missed later than the steps that were
generated or buffered by then. What is left over is nobody's: it says how good the account is.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.bench.faults.checker import Sighting
from millrace.bench.faults.injector import Kill
from millrace.bench.faults.subject import MAX_STALENESS

LONG_STEPS = 2.0  # a gap is long if so many more steps would have been done in it
NEAR_STEPS = MAX_STALENESS + 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Of the run that nobody disturbed."""

    wall_s: float
    start_s: float  # until the first step
    step_s: float  # from one to the next
    end_s: float  # after the last

    @classmethod
    def of(cls, sightings: Sequence[Sighting], *, began_s: float, ended_s: float) -> "Pace":
        first, last = sightings[0], sightings[-1]
        return cls(
            wall_s=ended_s - began_s,
            start_s=first.at_s - began_s,
            step_s=(last.at_s - first.at_s) / max(1, len(sightings) - 1),
            end_s=ended_s - last.at_s,
        )


@dataclass(kw_only=True, slots=True)
class TimeLoss:
    """By the kills of one role."""

    num_kills: int = 0
    seconds: float = 0.0
    redo_s: float = 0.0  # of these, for steps that had been done before


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    wall_s: float
    undisturbed_s: float
    by_role: dict[str, TimeLoss] = field(default_factory=dict[str, TimeLoss])

    @property
    def rest_s(self) -> float:
        """Neither undisturbed nor any kill's."""
        lost_s = sum(loss.seconds for loss in self.by_role.values())
        return self.wall_s - self.undisturbed_s - lost_s


def account(
    sightings: Sequence[Sighting],
    kills: Sequence[Kill],
    *,
    pace: Pace,
    began_s: float,
    ended_s: float,
) -> TimeAccount:
    by_role: dict[str, TimeLoss] = {}
    for kill in kills:
        by_role.setdefault(kill.role, TimeLoss()).num_kills += 1
    new = [sighting for sighting in sightings if sighting.is_new]
    gaps = _gaps(new, pace=pace, began_s=began_s, ended_s=ended_s)
    times = [kill.at_s for kill in kills]
    for begin_s, end_s, usual_s, step in gaps:
        index = bisect.bisect_left(times, end_s) - 1
        is_long = end_s - begin_s - usual_s > LONG_STEPS * pace.step_s
        if not is_long or index < 0 or step - kills[index].step > NEAR_STEPS:
            continue
        loss = by_role[kills[index].role]
        loss.seconds += end_s - begin_s - usual_s
        loss.redo_s += _redo_s(sightings, begin_s=begin_s, end_s=end_s)
    return TimeAccount(wall_s=ended_s - began_s, undisturbed_s=pace.wall_s, by_role=by_role)


def _gaps(
    new: Sequence[Sighting], *, pace: Pace, began_s: float, ended_s: float
) -> list[tuple[float, float, float, int]]:
    """From, to, how long it takes undisturbed, and the last step done at its beginning."""
    times = [began_s, *(sighting.at_s for sighting in new), ended_s]
    usual = [pace.start_s, *([pace.step_s] * (len(new) - 1)), pace.end_s]
    steps = [0, *(sighting.step for sighting in new)]
    return list(zip(times, times[1:], usual, steps, strict=False))


def _redo_s(sightings: Sequence[Sighting], *, begin_s: float, end_s: float) -> float:
    """From the first step that was done again to the first that was not."""
    again = [s.at_s for s in sightings if not s.is_new and begin_s <= s.at_s <= end_s]
    return end_s - again[0] if again else 0.0
