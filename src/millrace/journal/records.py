"""What a journal says, record by record. One tagged union; a record may bring a group with it,
or a part of one.

The life of a task's number: Issued, perhaps Progressed, then Admitted with its group, then part of
a step that has Begun and was Applied. Or it is Closed with a reason; or Reopened, to be played
again.
"""

from typing import Literal

import msgspec

Outcome = Literal["dropped", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all records; the tag is the class name."""


class IssuedRecord(Record, frozen=True):
    """The next number is being played."""

    number: int
    draw: int | None = None  # what its task stream must be told to find the same task again


class ObservedRecord(Record, frozen=True):
    """Its episodes were judged; a curriculum learns from it."""

    number: int
    solve_rate: float
    draw: int | None = None


class AdmittedRecord(Record, frozen=True):
    """Its group, which comes with the record, is ready to be trained."""

    number: int


class CarriedRecord(Record, frozen=True):
    """The same group again, out of a segment that goes."""

    number: int


class ProgressedRecord(Record, frozen=True):
    """More of what its group was told while it is played, which comes with the record. Said again
    when it is written again, out of a segment that goes."""

    number: int
    tries: int  # before the one that it belongs to
    part: int  # of that try, from 0 on


class ReopenedRecord(Record, frozen=True):
    """What there was of its group has become too stale; it is played again."""

    number: int


class ClosedRecord(Record, frozen=True):
    """It will not be trained."""

    number: int
    outcome: Outcome
    reason: str


class BegunRecord(Record, frozen=True):
    """The step that makes `version` learns from these groups, in this order, whenever it is
    done."""

    version: int
    fresh: tuple[int, ...]  # trained for the first time
    replayed: tuple[int, ...] = ()  # trained in an earlier step


class AppliedRecord(Record, frozen=True):
    """The trainer has reached `version`."""

    version: int
    was_skipped: bool = False  # in part or as a whole, as something was not finite


class StepEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step in a Snapshot."""

    begun: BegunRecord
    is_applied: bool
    was_skipped: bool


class LedgerSnapshot(Record, frozen=True):
    """All that the records before it said, but for the groups."""

    version: int  # steps up to this one need not be redone
    next_number: int
    open: tuple[int, ...]  # issued, and neither trained nor closed
    waiting: tuple[int, ...]  # of these, admitted and in no step; as they came
    totals: dict[str, int]  # numbers that are not open, by what became of them
    steps: tuple[StepEntry, ...] = ()
    draws: dict[int, int] = {}
    tries: dict[int, int] = {}  # of open numbers that were reopened: how often
    observed: tuple[tuple[int, ObservedRecord], ...] = ()  # with the positions of their records
    troubles: tuple[str, ...] = ()


AnyRecord = (
    IssuedRecord
    | ObservedRecord
    | ProgressedRecord
    | AdmittedRecord
    | CarriedRecord
    | ReopenedRecord
    | ClosedRecord
    | BegunRecord
    | AppliedRecord
    | LedgerSnapshot
)
