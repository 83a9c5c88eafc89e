"""The books: what became of every number that was issued.

Promise: each number is at any time either open or counted once in `totals`; whatever contradicts
that is written down in `troubles`. The state is a function of the records alone, so it is the same
after a crash. Its size is bounded by what is open and by the steps that may have to be redone,
however long the run.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Self

from millrace.journal.records import (
    AdmittedRecord,
    AnyRecord,
    AppliedRecord,
    BegunRecord,
    CarriedRecord,
    ClosedRecord,
    IssuedRecord,
    LedgerSnapshot,
    ObservedRecord,
    ProgressedRecord,
    ReopenedRecord,
    StepEntry,
)

TRAINED = "trained"
EARLIER = "before this journal"
MAX_TROUBLES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStatus:
    """Of a number that is not open any more."""

    what: str  # a key of Ledger.totals
    version: int = 0  # that the step made which trained it


@dataclass(kw_only=True, slots=True)
class LedgerStep:
    begun: BegunRecord
    is_applied: bool = False
    was_skipped: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.begun.fresh, *self.begun.replayed)

    def only(self, numbers: Collection[int]) -> "LedgerStep":
        """What is left of it to those who may want these groups again."""
        fresh = tuple(number for number in self.begun.fresh if number in numbers)
        begun = BegunRecord(version=self.begun.version, fresh=fresh)
        return replace(self, begun=begun)


class Ledger:
    def __init__(self, snapshot: LedgerSnapshot) -> None:
        self.version = snapshot.version  # steps up to this one need not be redone
        self.next_number = snapshot.next_number
        self.open = set(snapshot.open)  # issued, and neither trained nor closed
        # Of these, admitted and in no step; as they came, so a dict.
        self.waiting = dict.fromkeys(snapshot.waiting)
        self.totals = Counter(snapshot.totals)  # numbers that are not open, by what became of them
        self.steps = {
            entry.begun.version: LedgerStep(
                begun=entry.begun, is_applied=entry.is_applied, was_skipped=entry.was_skipped
            )
            for entry in snapshot.steps
        }  # in order; older ones only for groups that may be trained once more
        self.draws = dict(snapshot.draws)  # by number, of what is open or in a step
        self.tries = dict(snapshot.tries)  # given up before, by number; of what is open
        self.observed = list(snapshot.observed)  # with positions, since the checkpoint of `version`
        self.troubles = list(snapshot.troubles)
        self.closed: dict[int, TaskStatus] = {}  # since the snapshot, or take_closed()

    @classmethod
    def begin(
        cls, *, version: int = 0, next_number: int = 0, unfinished: Iterable[int] = ()
    ) -> Self:
        """Where nothing is known of what was before but where it stood."""
        opened = tuple(sorted(unfinished))
        closed = next_number - len(opened)
        return cls(
            LedgerSnapshot(
                version=version,
                next_number=next_number,
                open=opened,
                waiting=(),
                totals={EARLIER: closed} if closed else {},
            )
        )

    def snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(
            version=self.version,
            next_number=self.next_number,
            open=tuple(sorted(self.open)),
            waiting=tuple(self.waiting),
            totals=dict(self.totals),
            steps=tuple(
                StepEntry(begun=s.begun, is_applied=s.is_applied, was_skipped=s.was_skipped)
                for s in self.steps.values()
            ),
            draws=dict(self.draws),
            tries=dict(self.tries),
            observed=tuple(self.observed),
            troubles=tuple(self.troubles),
        )

    @property
    def last_begun(self) -> int:
        """The version that the newest step makes."""
        return max(self.version, *self.steps, 0)

    @property
    def live(self) -> set[int]:
        """Numbers whose groups are needed."""
        return {*self.waiting, *(n for step in self.steps.values() for n in step.numbers)}

    @property
    def in_steps(self) -> set[int]:
        """Numbers that are open and in a step."""
        return {n for s in self.steps.values() if not s.is_applied for n in s.begun.fresh}

    @property
    def playing(self) -> set[int]:
        """Numbers that are open and have no group yet, or none any more."""
        return self.open - self.waiting.keys() - self.in_steps

    def check(self) -> list[str]:
        """A sentence for each way in which the books do not add up."""
        closed, accounted = self.next_number - len(self.open), self.totals.total()
        found = list(self.troubles)
        if closed != accounted:
            found.append(
                f"{self.next_number} numbers were issued and {len(self.open)} are open, which"
                f" leaves {closed}, but {accounted} are accounted for."
            )
        return found

    def fold(self, record: AnyRecord, *, position: int) -> None:
        match record:
            case IssuedRecord():
                self._issue(record)
            case ObservedRecord():
                self.observed.append((position, record))
            case AdmittedRecord():
                self._expect(record.number in self.open - self.in_steps, "admitted", record.number)
                self.waiting[record.number] = None
            case ReopenedRecord():
                self.waiting.pop(record.number, None)
                self.tries[record.number] = self.tries.get(record.number, 0) + 1
            case ClosedRecord():
                self._close(record.number, TaskStatus(what=f"{record.outcome}: {record.reason}"))
            case BegunRecord():
                self._begin_step(record)
            case AppliedRecord():
                self._apply(record)
            case CarriedRecord() | ProgressedRecord() | LedgerSnapshot():
                pass  # the books are the same

    def cover(self, version: int, *, position: int, keep: Collection[int] = ()) -> None:
        """A good checkpoint of `version` holds what the records up to `position` said of tasks.
        Groups of steps up to it are needed no more, but for those to `keep`."""
        self.version = max(self.version, version)
        steps = {v: step if v > version else step.only(keep) for v, step in self.steps.items()}
        self.steps = {v: step for v, step in steps.items() if step.numbers or v > version}
        needed = self.live | self.open
        self.draws = {number: draw for number, draw in self.draws.items() if number in needed}
        self.observed = [(at, one) for at, one in self.observed if at > position]

    def take_closed(self) -> dict[int, TaskStatus]:
        """For whoever keeps them one by one; here they are counts from then on."""
        closed, self.closed = self.closed, {}
        return closed

    def _issue(self, record: IssuedRecord) -> None:
        self._expect(record.number == self.next_number, "issued", record.number)
        self.next_number = max(self.next_number, record.number + 1)
        self.open.add(record.number)
        if record.draw is not None:
            self.draws[record.number] = record.draw

    def _begin_step(self, begun: BegunRecord) -> None:
        is_next = begun.version == self.last_begun + 1
        self._expect(is_next, f"begun (it makes version {begun.version})", *begun.fresh[:1])
        for number in begun.fresh:
            self._expect(number in self.waiting, f"taken for step {begun.version}", number)
            self.waiting.pop(number, None)
        self.steps[begun.version] = LedgerStep(begun=begun)

    def _apply(self, applied: AppliedRecord) -> None:
        step = self.steps.get(applied.version)
        if step is None or step.is_applied:
            return  # redone: it counted when it was applied first
        step.is_applied = True
        step.was_skipped = applied.was_skipped
        for number in step.begun.fresh:
            self._close(number, TaskStatus(what=TRAINED, version=applied.version))

    def _close(self, number: int, fate: TaskStatus) -> None:
        self._expect(number in self.open, fate.what, number)
        self.open.discard(number)
        self.waiting.pop(number, None)
        self.tries.pop(number, None)
        self.totals[fate.what] += 1
        self.closed[number] = fate
        if fate.what != TRAINED:
            self.draws.pop(number, None)

    def _expect(self, holds: bool, what: str, *numbers: int) -> None:
        if not holds and len(self.troubles) < MAX_TROUBLES:
            self.troubles.append(
                f"Number {', '.join(map(str, numbers))} was {what} when it could not be."
            )
