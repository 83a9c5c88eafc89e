"""The ledger: the status of every task that was issued.

Promise: each task is either open or counted once in `totals`; a change that contradicts this fails
an assertion. The ledger in memory equals the tables on the disk once the journal is flushed. Its
size is bounded by the open tasks and by the steps that may be redone, however long the run.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

Outcome = Literal["dropped", "failed"]
# Skipped in part or as a whole, because an update was not finite.
StepStatus = Literal["begun", "applied", "skipped"]
TRAINED = "trained"
UNKNOWN = "unknown"  # closed before this journal began


@dataclass(kw_only=True, slots=True)
class LedgerStep:
    """A step of the trainer, and the tasks whose groups it learns from, in order."""

    version: int  # that the step makes
    fresh: tuple[int, ...]  # trained for the first time
    replayed: tuple[int, ...] = ()  # trained in an earlier step
    status: StepStatus = "begun"

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.fresh, *self.replayed)

    @property
    def is_applied(self) -> bool:
        return self.status != "begun"


@dataclass(slots=True)
class Observation:
    """The solve rate of a group, which a curriculum learns from."""

    position: int  # of the journal
    number: int
    draw: int
    solve_rate: float


@dataclass(kw_only=True, slots=True)
class Ledger:
    covered_version: int = 0  # steps up to this one need not be redone
    next_number: int = 0
    open: set[int] = field(default_factory=set[int])
    waiting: dict[int, None] = field(default_factory=dict[int, None])  # in order of admission
    totals: Counter[str] = field(default_factory=Counter[str])  # closed tasks by status and reason
    # In order of versions. Covered steps stay only for groups that may be trained once more.
    steps: dict[int, LedgerStep] = field(default_factory=dict[int, LedgerStep])
    draws: dict[int, int] = field(default_factory=dict[int, int])  # of open tasks and of steps
    tries: dict[int, int] = field(default_factory=dict[int, int])  # of open tasks tried before
    observations: list[Observation] = field(default_factory=list[Observation])

    @classmethod
    def begin(
        cls, *, version: int = 0, next_number: int = 0, unfinished: Iterable[int] = ()
    ) -> Self:
        """The ledger of a run of which only a checkpoint is known."""
        opened = set(unfinished)
        closed = next_number - len(opened)
        return cls(
            covered_version=version,
            next_number=next_number,
            open=opened,
            totals=Counter({UNKNOWN: closed} if closed else {}),
        )

    @property
    def last_step(self) -> int:
        """The version that the newest step makes."""
        return max(self.covered_version, *self.steps, 0)

    @property
    def retained(self) -> set[int]:
        return {*self.waiting, *(n for step in self.steps.values() for n in step.numbers)}

    @property
    def training(self) -> set[int]:
        return {n for step in self.steps.values() if not step.is_applied for n in step.fresh}

    @property
    def running(self) -> set[int]:
        """Open tasks that have no group yet, or none any more."""
        return self.open - self.waiting.keys() - self.training

    def redone(self, *, after: int) -> list[int]:
        """Tasks that steps beyond a version train for the first time."""
        return [n for version, step in self.steps.items() if version > after for n in step.fresh]

    def check(self) -> list[str]:
        """A sentence for each way in which the ledger does not add up."""
        closed, counted = self.next_number - len(self.open), self.totals.total()
        if closed == counted:
            return []
        return [
            f"{self.next_number} tasks were issued and {len(self.open)} are open, so {closed} are"
            f" closed, but {counted} are counted."
        ]

    def issue(self, number: int, *, draw: int | None) -> None:
        assert number == self.next_number, f"task {number} is issued out of order"
        self.next_number += 1
        self.open.add(number)
        if draw is not None:
            self.draws[number] = draw

    def admit(self, number: int) -> None:
        assert number in self.open - self.training, f"task {number} is closed or in training"
        self.waiting[number] = None

    def reopen(self, number: int) -> None:
        self.waiting.pop(number, None)
        self.tries[number] = self.tries.get(number, 0) + 1

    def close(self, number: int, what: str) -> None:
        """`what`: the key in `totals`."""
        assert number in self.open, f"task {number} is closed already"
        self.open.discard(number)
        self.waiting.pop(number, None)
        self.tries.pop(number, None)
        self.totals[what] += 1
        if what != TRAINED:
            self.draws.pop(number, None)

    def begin_step(self, step: LedgerStep) -> None:
        assert step.version == self.last_step + 1, f"step {step.version} begins out of order"
        for number in step.fresh:
            assert number in self.waiting, f"task {number} of step {step.version} has no group"
            del self.waiting[number]
        self.steps[step.version] = step

    def finish_step(self, version: int, *, was_skipped: bool) -> bool:
        """False if the step was redone: its tasks counted when it was applied first."""
        step = self.steps.get(version)
        if step is None or step.is_applied:
            return False
        self.steps[version] = replace(step, status="skipped" if was_skipped else "applied")
        for number in step.fresh:
            self.close(number, TRAINED)
        return True

    def cover(self, version: int, *, position: int, keep: Collection[int] = ()) -> None:
        """A good checkpoint of `version` contains all observations up to `position`. Groups of
        steps up to it are not needed, except for those to `keep`."""
        self.covered_version = max(self.covered_version, version)
        steps = {v: step if v > version else _only(step, keep) for v, step in self.steps.items()}
        self.steps = {v: step for v, step in steps.items() if step.numbers or v > version}
        needed = self.retained | self.open
        self.draws = {number: draw for number, draw in self.draws.items() if number in needed}
        self.observations = [one for one in self.observations if one.position > position]


def _only(step: LedgerStep, numbers: Collection[int]) -> LedgerStep:
    """The part of a covered step that may be trained once more."""
    fresh = tuple(number for number in step.fresh if number in numbers)
    return replace(step, fresh=fresh, replayed=())
