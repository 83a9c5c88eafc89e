"""What stands in for the journal of a run that has none."""

from collections.abc import Collection, Iterable, Sequence

from millrace.core.partials import GroupProgress
from millrace.core.records import Group
from millrace.journal.ledger import Ledger
from millrace.journal.records import Outcome


class NoJournal:
    """A Journal that writes nothing and knows of no past."""

    is_too_large = False
    position = None  # so that nobody takes a checkpoint and a journal for a pair

    def __init__(self) -> None:
        self.ledger = Ledger.begin()

    def issued(self, number: int, *, draw: int | None) -> None: ...

    def observed(self, number: int, *, solve_rate: float, draw: int | None) -> None: ...

    async def progressed(
        self, number: int, *, tries: int, part: int, progress: GroupProgress
    ) -> None: ...

    async def progress(self, number: int) -> list[GroupProgress]:
        return []

    async def admitted(self, group: Group) -> None: ...

    def reopened(self, number: int) -> None: ...

    def closed(self, number: int, *, outcome: Outcome, reason: str) -> None: ...

    async def begun(
        self, version: int, *, fresh: Iterable[int], replayed: Iterable[int] = ()
    ) -> None: ...

    def applied(self, version: int, *, was_skipped: bool) -> None: ...

    async def groups(self, numbers: Sequence[int]) -> list[Group]:
        assert not numbers, "there are none"
        return []

    async def settle(self) -> None: ...

    async def cover(
        self, version: int, *, position: int | None, keep: Collection[int] = ()
    ) -> None: ...

    async def close(self) -> None: ...
