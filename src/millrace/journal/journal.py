"""The journal while a run goes on: what happened is appended, and read again to redo it.

Promise: admitted() and begun() return when that is durable; everything else is written in order
with them. What is not needed any more is given up once a good checkpoint covers it, so that the
size is bounded by what waits and by the steps since the last checkpoints.

Used from the controller's event loop. Encoding and the disk are the writer's thread.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from millrace.config import JournalConfig
from millrace.core.errors import JournalError
from millrace.core.partials import GroupProgress
from millrace.core.records import Group, Task
from millrace.journal.encoding import decode_group, decode_progress
from millrace.journal.fates import TaskStatusFile
from millrace.journal.reading import JournalHistory
from millrace.journal.records import (
    AdmittedRecord,
    AnyRecord,
    AppliedRecord,
    BegunRecord,
    CarriedRecord,
    ClosedRecord,
    IssuedRecord,
    ObservedRecord,
    Outcome,
    ProgressedRecord,
    ReopenedRecord,
)
from millrace.journal.segments import FileSink, OpenSink, RecordLocation, Segments, UnsyncedSink
from millrace.journal.writer import Content, Writer, write_failure

TaskOf = Callable[[int, int | None], Task]  # of a number, and of what its stream had drawn for it


class Journal:
    def __init__(
        self,
        folder: Path,
        *,
        past: JournalHistory,
        task_of: TaskOf,
        settings: JournalConfig,
        open_sink: OpenSink | None = None,
    ) -> None:
        """Goes on behind `past`; what else lies in the folder and is not part of it is removed."""
        self.ledger = past.ledger
        self._task_of = task_of
        self._max_bytes = settings.max_bytes
        self._places = past.places
        self._parts = past.parts
        self._admitting: set[int] = set()  # numbers whose groups are being written
        self._position = past.position
        self._sizes = dict(past.sizes)  # of the segments before those of the writer
        self._fates = TaskStatusFile(folder)
        sink = open_sink or (FileSink if settings.fsync else UnsyncedSink)
        self._segments = Segments(folder, open_sink=sink)
        self._reading = asyncio.Lock()  # what is read is not given up meanwhile
        try:
            self._writer = Writer(
                self._segments,
                first=self._tidy(past),
                segment_bytes=settings.segment_bytes,
                commit_interval_s=settings.commit_interval_s,
            )
        except OSError as error:
            raise write_failure(error, folder) from None
        self._append(self.ledger.snapshot())

    def _tidy(self, past: JournalHistory) -> int:
        """Leave whole segments only; returns the number of the next."""
        folder = self._segments.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ids = self._segments.ids()
        if past.sizes and past.sizes != self._whole_sizes(ids, past):
            raise JournalError(
                f"The journal in {str(folder)!r} was written to while it was read; start again."
            )
        if past.torn is not None:
            self._segments.cut(past.torn.segment, end=past.torn.end)
        self._segments.remove([segment for segment in ids if segment not in past.sizes])
        self._fates.begin(self.ledger)  # before the snapshot, which has only counts of them
        return max(ids, default=0) + 1

    def _whole_sizes(self, ids: Sequence[int], past: JournalHistory) -> dict[int, int]:
        """Bytes by segment, without the torn end that is known."""
        sizes = {segment: self._segments.path(segment).stat().st_size for segment in ids}
        if past.torn is not None and past.torn.segment in sizes:
            sizes[past.torn.segment] -= past.torn.num_bytes
        return sizes

    @property
    def num_bytes(self) -> int:
        return sum({**self._sizes, **self._writer.sizes}.values())

    @property
    def is_too_large(self) -> bool:
        """A checkpoint would let it shrink."""
        return self.num_bytes > self._max_bytes

    @property
    def position(self) -> int:
        """Of the last record so far."""
        return self._position

    def issued(self, number: int, *, draw: int | None) -> None:
        """Nothing is written where a number is tried again."""
        if number >= self.ledger.next_number:
            self._append(IssuedRecord(number=number, draw=draw))

    def observed(self, number: int, *, solve_rate: float, draw: int | None) -> None:
        """Nothing is written where the stream of tasks does not learn."""
        if draw is not None:
            self._append(ObservedRecord(number=number, solve_rate=solve_rate, draw=draw))

    async def progressed(
        self, number: int, *, tries: int, part: int, progress: GroupProgress
    ) -> None:
        """Of a group in flight. Returns when a crash cannot lose that any more."""
        record = ProgressedRecord(number=number, tries=tries, part=part)
        place = await asyncio.wrap_future(self._append(record, content=progress))
        assert place is not None
        if number in self.ledger.playing:
            self._parts.add(record, place)

    async def progress(self, number: int) -> list[GroupProgress]:
        """What is known of a group that is to be played: of the try that goes on, in order."""
        if number not in self._parts:
            return []
        async with self._reading:
            places = self._parts.of(number, tries=self.ledger.tries.get(number, 0))
            return await asyncio.to_thread(
                lambda: [decode_progress(self._segments.read_at(place)) for place in places]
            )

    async def admitted(self, group: Group) -> None:
        """Its group may be trained, now that a crash cannot lose it."""
        self._parts.drop(group.number)
        writing = self._append(AdmittedRecord(number=group.number), content=group)
        self._admitting.add(group.number)
        try:
            place = await asyncio.wrap_future(writing)
        finally:
            self._admitting.discard(group.number)
        assert place is not None
        self._places[group.number] = place

    def reopened(self, number: int) -> None:
        self._places.pop(number, None)
        self._parts.drop(number)
        self._append(ReopenedRecord(number=number))

    def closed(self, number: int, *, outcome: Outcome, reason: str) -> None:
        self._parts.drop(number)
        self._append(ClosedRecord(number=number, outcome=outcome, reason=reason))

    async def begun(
        self, version: int, *, fresh: Iterable[int], replayed: Iterable[int] = ()
    ) -> None:
        """From here on the step that makes `version` is of these groups, whatever happens."""
        record = BegunRecord(version=version, fresh=tuple(fresh), replayed=tuple(replayed))
        await asyncio.wrap_future(self._append(record))

    def applied(self, version: int, *, was_skipped: bool) -> None:
        self._append(AppliedRecord(version=version, was_skipped=was_skipped))

    async def groups(self, numbers: Sequence[int]) -> list[Group]:
        """As they were admitted."""
        tasks = [self._task_of(number, self.ledger.draws.get(number)) for number in numbers]
        async with self._reading:
            return await asyncio.to_thread(self._read, numbers, tasks)

    async def settle(self) -> None:
        """Returns when all that was written so far is durable."""
        await asyncio.wrap_future(self._last)

    async def cover(self, version: int, *, position: int, keep: Collection[int] = ()) -> None:
        """There is a good checkpoint of `version`, made when `position` was the last record. Give
        up what only an older one would need; `keep` are groups that may be trained once more."""
        self.ledger.cover(version, position=position, keep=keep)
        async with self._reading:
            await self._compact()

    async def close(self) -> None:
        await self._writer.close()

    def _append(
        self, record: AnyRecord, *, content: Content = None
    ) -> "Future[RecordLocation | None]":
        self._position += 1
        self.ledger.fold(record, position=self._position)
        self._last = self._writer.append(record, position=self._position, content=content)
        return self._last

    def _read(self, numbers: Sequence[int], tasks: Sequence[Task]) -> list[Group]:
        return [
            decode_group(self._segments.read_at(self._places[number]), task=task)
            for number, task in zip(numbers, tasks, strict=True)
        ]

    async def _compact(self) -> None:
        """Remove the segments in which little is needed, once that is elsewhere."""
        newest = self._writer.segment
        await self.settle()  # whose place nobody knows yet is in the newest segment, or behind it
        live = self.ledger.live
        self._places = {n: place for n, place in self._places.items() if n in live}
        self._parts.keep_needed(self.ledger)
        sizes = {**self._sizes, **self._writer.sizes}
        needed = dict.fromkeys(sizes, 0)  # bytes by segment
        for place in (*self._places.values(), *(place for _, place in self._parts.items())):
            needed[place.segment] += place.length
        dead = [s for s, size in sizes.items() if s < newest and 2 * needed[s] < size]
        if not dead:
            return
        for segment in dead:
            await self._carry(segment)
            await self._carry_parts(segment)
        while closed := self.ledger.take_closed():
            await asyncio.to_thread(self._fates.write, closed)
        # What the segments said besides is said by this, and in the fates.
        await asyncio.wrap_future(self._append(self.ledger.snapshot()))
        await asyncio.to_thread(self._segments.remove, dead)
        for segment in dead:
            self._sizes.pop(segment, None)
            self._writer.sizes.pop(segment, None)

    async def _carry(self, segment: int) -> None:
        """Write again what is needed of a segment."""
        places = {n: place for n, place in self._places.items() if place.segment == segment}
        found = await asyncio.to_thread(
            lambda: {n: self._segments.read_at(place) for n, place in places.items()}
        )
        writing = {
            number: self._append(CarriedRecord(number=number), content=content)
            for number, content in found.items()
            if self._is_current(number, places[number])
        }
        for number, future in writing.items():
            place = await asyncio.wrap_future(future)
            if place is not None and self._is_current(number, places[number]):
                self._places[number] = place

    async def _carry_parts(self, segment: int) -> None:
        """Likewise what was told of groups in flight."""
        lying = [(part, place) for part, place in self._parts.items() if place.segment == segment]
        found = await asyncio.to_thread(
            lambda: [self._segments.read_at(place) for _, place in lying]
        )
        writing = [
            (part, place, self._append(part, content=content))
            for (part, place), content in zip(lying, found, strict=True)
            if self._parts.holds(part, place)
        ]
        for part, place, future in writing:
            moved = await asyncio.wrap_future(future)
            if moved is not None and self._parts.holds(part, place):
                self._parts.add(part, moved)

    def _is_current(self, number: int, place: RecordLocation) -> bool:
        """False if it is no longer needed, or another try at it is there or on its way."""
        is_replaced = number in self._admitting or self._places.get(number) is not place
        return number in self.ledger.live and not is_replaced
