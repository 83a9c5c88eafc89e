"""Commits changes to the database in a thread of its own, many at a time.

Promise: changes are applied in the order of append(), and a future resolves when its change and all
before it are committed. One commit serves all changes that have gathered meanwhile. After the first
failure nothing is written any more: all later changes fail with the same sentence.

append() and close() are called from one event loop; encoding and SQL run in the thread. Its queue
is bounded by its callers, because callers that append a group or tokens await the commit.
"""

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from millrace.core.errors import JournalError

Change = Callable[[sqlite3.Cursor], object]  # executes SQL within the open transaction

COMMIT_INTERVAL_S = 0.005  # how long a change waits for others that share its commit
VACUUM_PAGES = 128  # freed per commit at most, so that no commit takes long
MIN_FREE_PAGES = 4


class _Pending(NamedTuple):
    position: int
    change: Change
    done: "Future[None]"


class JournalWriter:
    def __init__(
        self, db: sqlite3.Connection, *, folder: Path, commit_interval_s: float = COMMIT_INTERVAL_S
    ) -> None:
        self._db = db
        # One for all statements: a connection keeps a list of all cursors that it ever made.
        self._cursor = db.cursor()
        self._folder = folder
        self._commit_interval_s = commit_interval_s
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self.num_commits = 0
        self.num_bytes = 0  # in use; free pages, which later changes fill again, are not counted
        self._measure()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, change: Change, *, position: int) -> "Future[None]":
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a caller may stop waiting; the change is written
        self._queue.put(_Pending(position=position, change=change, done=done))
        return done

    async def close(self) -> None:
        """Returns when everything that was appended is committed."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._commit(batch)
        finally:
            self._db.close()

    def _gather(self) -> list[_Pending] | None:
        """The changes to commit together; None after the last."""
        first = self._queue.get()
        if first is None:
            return None
        if self._commit_interval_s:
            time.sleep(self._commit_interval_s)
        batch = [first]
        while not self._queue.empty():
            more = self._queue.get()
            if more is None:
                self._queue.put(None)  # found again by the next call
                break
            batch.append(more)
        return batch

    def _commit(self, batch: Sequence[_Pending]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._apply(batch)
        except Exception as error:  # noqa: BLE001 - the callers that wait raise it
            is_disk = isinstance(error, sqlite3.OperationalError | OSError)
            self._failure = write_failure(error, self._folder) if is_disk else error
            for pending in batch:
                pending.done.set_exception(self._failure)
            return
        for pending in batch:
            pending.done.set_result(None)

    def _apply(self, batch: Sequence[_Pending]) -> None:
        cursor = self._cursor.execute("BEGIN IMMEDIATE")
        try:
            for pending in batch:
                pending.change(cursor)
            self._shrink()
            set_meta(cursor, "position", batch[-1].position)
            self._db.commit()
        except BaseException:
            if self._db.in_transaction:  # SQLite itself has rolled back after some errors
                self._db.rollback()
            raise
        self.num_commits += 1
        self._measure()

    def _shrink(self) -> None:
        """Return free pages to the file system once they are more than those in use."""
        pages, free = self._pragma("page_count"), self._pragma("freelist_count")
        if 2 * free > pages and free > MIN_FREE_PAGES:
            # Python executes the first step of this statement only, which frees one page. The last
            # one ends with the next statement of the cursor; until then, no commit is possible.
            for _ in range(min(free, VACUUM_PAGES)):
                self._cursor.execute("PRAGMA incremental_vacuum(1)")

    def _measure(self) -> None:
        used = self._pragma("page_count") - self._pragma("freelist_count")
        self.num_bytes = used * self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return self._cursor.execute(f"PRAGMA {name}").fetchone()[0]


def set_meta(cursor: sqlite3.Cursor, key: str, value: int) -> None:
    cursor.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def write_failure(error: Exception, folder: Path) -> JournalError:
    return JournalError(
        f"The journal in {str(folder)!r} could not be written ({error}): the disk is full, over its"
        " quota, or failing. Make room there, set run_dir to another disk, or journal.max_bytes to"
        " 0 (no journal), and --resume."
    )
