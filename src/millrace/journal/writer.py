"""Puts records on the disk in a thread of its own, many at a time.

Promise: records are written in the order of append(), and a future resolves when its record and all
before it are durable. One write and one sync serve everything that has gathered meanwhile. A disk
that fails once is not asked again: all later records fail with the same sentence.

append() and close() are called from one event loop; encoding, writing and syncing happen in the
thread. Its queue is bounded by its callers: whoever appends a group, or
progress, waits for it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.wire import Frame
from millrace.core import files as storage
from millrace.core.errors import JournalError
from millrace.core.partials import GroupProgress
from millrace.core.records import Group
from millrace.journal.encoding import encode_group, encode_progress, encode_record
from millrace.journal.framing import SEGMENT_MAGIC, frame
from millrace.journal.records import AnyRecord
from millrace.journal.segments import RecordLocation, Segments

Content = Group | GroupProgress | memoryview | None  # to be encoded, or encoded before


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pending:
    position: int
    record: AnyRecord
    content: Content
    done: "Future[RecordLocation | None]"


class Writer:
    def __init__(
        self, segments: Segments, *, first: int, segment_bytes: int, commit_interval_s: float
    ) -> None:
        """`first`: number of the segment to begin. `commit_interval_s`: how long a record may wait
        for others to share a sync with."""
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._commit_interval_s = commit_interval_s
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._failure: JournalError | None = None
        self.segment = first  # that is being written
        self._sink = segments.begin(first)
        self._size = len(SEGMENT_MAGIC)
        self._synced = 0
        self.sizes = {first: self._size}  # bytes by segment, of those written here
        self.num_commits = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(
        self, record: AnyRecord, *, position: int, content: Content = None
    ) -> "Future[RecordLocation | None]":
        """Resolves to the place of its content, if there is any."""
        done: Future[RecordLocation | None] = Future()
        done.set_running_or_notify_cancel()  # who waits may give up; the record is written
        self._queue.put(_Pending(position=position, record=record, content=content, done=done))
        return done

    async def close(self) -> None:
        """Everything that was appended is written."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._commit(batch)
        finally:
            self._sink.close()

    def _gather(self) -> list[_Pending] | None:
        """What to commit together; None = the end."""
        first = self._queue.get()
        if first is None:
            return None
        if self._commit_interval_s:
            time.sleep(self._commit_interval_s)
        batch = [first]
        while not self._queue.empty():
            more = self._queue.get()
            if more is None:
                self._queue.put(None)  # for the next turn
                break
            batch.append(more)
        return batch

    def _commit(self, batch: Sequence[_Pending]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            laid = [self._lay(pending) for pending in batch]
            self._sink.write([part for parts, _ in laid for part in parts])
            self._sync()
        except (OSError, JournalError) as error:
            is_own = isinstance(error, JournalError)
            self._failure = error if is_own else write_failure(error, self._segments.folder)
            for pending in batch:
                pending.done.set_exception(self._failure)
            return
        for pending, (_, place) in zip(batch, laid, strict=True):
            pending.done.set_result(place)

    def _lay(self, pending: _Pending) -> tuple[list[Frame], RecordLocation | None]:
        """What is to be written of it, and where what it brings will lie."""
        content = _encoded(pending.content)
        payload = encode_record(pending.record, content=content)
        parts = frame(payload, position=pending.position, synced=self._synced)
        self._size += sum(memoryview(part).nbytes for part in parts)
        self.sizes[self.segment] = self._size
        length = memoryview(content).nbytes
        place = RecordLocation(segment=self.segment, offset=self._size - length, length=length)
        return parts, place if length else None

    def _sync(self) -> None:
        self._sink.sync()
        self._synced = self._size
        self.num_commits += 1
        if self._size < self._segment_bytes:
            return
        sealed, self._sink = self._sink, self._segments.begin(self.segment + 1)
        sealed.close()
        self.segment += 1
        self._size, self._synced = len(SEGMENT_MAGIC), 0
        self.sizes[self.segment] = self._size


def _encoded(content: Content) -> bytes | memoryview:
    match content:
        case Group():
            return encode_group(content)
        case GroupProgress():
            return encode_progress(content)
        case _:
            return content or b""


def write_failure(error: OSError, folder: Path) -> JournalError:
    return JournalError(
        f"The journal in {str(folder)!r} could not be written ({storage.reason(error)}): make room"
        " there, set run_dir to another disk, or journal.enabled to false, and --resume."
    )
