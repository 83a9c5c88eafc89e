"""The SQLite database of a journal, RUN_DIR/journal/journal.db, the payloads in its tables, and the
thread that commits changes to it, many at a time.

Promise: a transaction that was committed is there after any crash of a process and after a loss of
power; one that was not is absent as a whole. Readers never block the writer or change anything.
Changes are applied in the order of append(), and a future resolves when its change and all before
it are committed. One commit serves all changes that have gathered meanwhile. After the first
failure nothing is written any more: all later changes fail with the same sentence.

A payload is a group, or streamed tokens: uint32 length | frame, for each frame of
millrace.cluster.wire, little-endian. Decoding returns a valid record or raises JournalError,
whatever bytes it is given, and allocates no more than they are long. Nothing is unpickled.
docs/journal.md documents both. Torch-free.

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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import xxhash

from millrace.cluster.wire import Decoder, Frame, WireError, encode
from millrace.core.errors import JournalError
from millrace.core.records import Completion, Group, Task

T = TypeVar("T")
Connect = Callable[[str], sqlite3.Connection]

FORMAT_VERSION = 2  # 1 was a folder of *.log files
NAME = "journal.db"
PAGE_BYTES = 32768  # payloads span many pages, and each page costs time
CHECKPOINT_PAGES = 512  # the write-ahead log is copied into the database beyond this, 16 MiB
CACHE_KIB = 16384  # holds a large commit; beyond it, SQLite writes pages early
BUSY_TIMEOUT_S = 5.0
LENGTH_BYTES = 4
SCHEMA = Path(__file__).with_name("schema.sql")
TABLES = ("tasks", "groups", "steps", "step_groups", "partials", "observations")


def connect_file(path: str) -> sqlite3.Connection:
    """`path`: of a file, or the URI of one."""
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=True
    )


def open_writer(
    folder: Path, *, connect: Connect = connect_file, schema: Path = SCHEMA
) -> sqlite3.Connection:
    """The one connection that writes; the tables exist when it returns."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_old_format(folder)
    db = connect(str(folder / NAME))
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(
                f"the file system allows no write-ahead log, only {mode}"
            )
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.execute("PRAGMA secure_delete = OFF")  # a default of some builds; it writes zeros
        db.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_PAGES * PAGE_BYTES}")
        # One sync per commit: what is committed survives a loss of power.
        db.execute("PRAGMA synchronous = FULL")
        if not has_tables(db):
            db.executescript(f"BEGIN;{schema.read_text()}COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def open_reader(folder: Path) -> sqlite3.Connection:
    """A read-only connection; the run may be alive."""
    db = connect_file(f"file:{quote(str((folder / NAME).absolute()))}?mode=ro")
    # A damaged length must not allocate more than there is.
    num_bytes = sum(path.stat().st_size for path in folder.glob(f"{NAME}*"))
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(num_bytes, PAGE_BYTES))
    db.execute("BEGIN")  # one snapshot for all that is read
    return db


def has_tables(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone())


def refuse_old_format(folder: Path) -> None:
    if any(folder.glob("*.log")):
        raise JournalError(
            f"The journal in {str(folder)!r} was written by an older version of Millrace; resume"
            " the run with that version, or remove the folder to resume from the newest checkpoint"
            " without the work done since."
        )


def damaged(folder: Path, damage: object) -> JournalError:
    text = " ".join(str(damage).split())
    return JournalError(
        f"The journal in {str(folder)!r} is damaged: {text}. Restore it from a copy, or remove"
        " the folder to resume from the newest checkpoint without the work done since."
    )


def checksum(payload: bytes) -> bytes:
    return xxhash.xxh3_64_digest(payload)


def encode_group(group: Group) -> bytes:
    """The group without its task, which may hold any object and is known by its number."""
    try:
        return _pack(encode(replace(group, task=Task(prompt=""))))
    except WireError as error:
        raise JournalError(
            f"Group {group.number} cannot be written to the journal: {error} Or set"
            " journal.max_bytes to 0, which turns the journal off."
        ) from None


def decode_group(payload: bytes, *, task: Task) -> Group:
    return replace(_decode(Group, payload), task=task)


def encode_completion(completion: Completion) -> bytes:
    return _pack(encode(completion))


def decode_completion(payload: bytes) -> Completion:
    return _decode(Completion, payload)


def _decode(kind: type[T], payload: bytes) -> T:
    try:
        return Decoder(kind).decode(_unpack(payload))
    except WireError as error:
        raise JournalError(f"A payload of the journal is not a {kind.__name__}: {error}") from None


def _pack(frames: Sequence[Frame]) -> bytes:
    lengths = (memoryview(frame).nbytes.to_bytes(LENGTH_BYTES, "little") for frame in frames)
    return b"".join(part for pair in zip(lengths, frames, strict=True) for part in pair)


def _unpack(payload: bytes) -> list[Frame]:
    frames: list[Frame] = []
    rest = memoryview(payload)
    while rest:
        end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES], "little")
        if end > len(rest):
            raise JournalError("A payload of the journal ends in the middle of a frame.")
        frames.append(rest[LENGTH_BYTES:end])
        rest = rest[end:]
    return frames


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
