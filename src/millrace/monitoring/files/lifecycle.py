"""lifecycle/step_N.jsonl: when the groups of a step were generated, scored, buffered and trained.

Neither the trace, whose spans name no group, nor the journal, which has no times, could tell. Times
are seconds on the clock of trace.json. The times of a group are journaled with it, so a resumed run
knows them, too.
"""

from dataclasses import dataclass

from millrace.core.spans import GroupLife
from millrace.monitoring.run_dir import RunDir, read_step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLife:
    step: int
    begin_s: float
    end_s: float
    unix_s: float  # seconds since the epoch at the end
    groups: list[GroupLife]  # that it trained
    replayed: list[int]  # numbers of those that an earlier step has trained, too
    lost: list[GroupLife]  # attempts that ended since the step before, without a group to train


def read_lifecycle(run_dir: RunDir, step: int) -> StepLife | None:
    """None if the step has no file, or none any more."""
    return next(iter(read_step(run_dir.lifecycle, step, StepLife)), None)
