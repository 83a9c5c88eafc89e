"""The SQLite database of a journal, RUN_DIR/journal/journal.db, and the payloads in its tables.

Promise: a transaction that was committed is there after any crash of a process and after a loss of
power; one that was not is absent as a whole. Readers never block the writer or change anything.

A payload is a group, or streamed tokens: uint32 length | frame, for each frame of
millrace.cluster.wire, little-endian. Decoding returns a valid record or raises JournalError,
whatever bytes it is given, and allocates no more than they are long. Nothing is unpickled.
docs/journal.md documents both. Torch-free.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
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

SCHEMA = """
CREATE TABLE meta (
  key TEXT PRIMARY KEY,          -- 'format_version', 'position', 'covered_version'
  value INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tasks (
  number INTEGER PRIMARY KEY,    -- position in the run's task stream, from 0, without gaps
  status TEXT NOT NULL,          -- running, waiting, training, trained, dropped, failed, unknown
  reason TEXT,                   -- why it was dropped or failed
  version INTEGER,               -- the step that trained it made this version
  draw INTEGER,                  -- row of the dataset that a curriculum drew for it
  tries INTEGER NOT NULL DEFAULT 0,  -- attempts before the current one; they became too stale
  admitted INTEGER               -- position of the journal when its group was admitted
);
CREATE INDEX open_tasks ON tasks (number) WHERE status IN ('running', 'waiting', 'training');
CREATE TABLE groups (
  number INTEGER PRIMARY KEY,    -- a task that is waiting, or in a step that may be redone
  payload BLOB NOT NULL,
  checksum BLOB NOT NULL         -- XXH3-64 of the payload
);
CREATE TABLE steps (
  version INTEGER PRIMARY KEY,   -- the version of the weights that the step makes
  status TEXT NOT NULL           -- begun, applied, or skipped: an update of it was not finite
);
CREATE TABLE step_groups (
  version INTEGER NOT NULL,
  place INTEGER NOT NULL,        -- order within the step
  number INTEGER NOT NULL,
  replayed INTEGER NOT NULL,     -- 1: an earlier step has trained it, too
  PRIMARY KEY (version, place)
) WITHOUT ROWID;
CREATE TABLE partials (
  id INTEGER PRIMARY KEY,        -- in the order of sampling
  number INTEGER NOT NULL,       -- a task that is running
  request TEXT NOT NULL,
  digest TEXT NOT NULL,          -- of everything that the answer depends on
  member INTEGER NOT NULL,       -- which completion of the request
  start INTEGER NOT NULL,        -- tokens of the completion before these
  num_tokens INTEGER NOT NULL,
  payload BLOB NOT NULL,
  checksum BLOB NOT NULL
);
CREATE INDEX partials_of_task ON partials (number);
CREATE TABLE observations (
  position INTEGER PRIMARY KEY,  -- of the journal
  number INTEGER NOT NULL,
  draw INTEGER NOT NULL,
  solve_rate REAL NOT NULL
);
"""
TABLES = ("tasks", "groups", "steps", "step_groups", "partials", "observations")


def connect_file(path: str) -> sqlite3.Connection:
    """`path`: of a file, or the URI of one."""
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=True
    )


def open_writer(folder: Path, *, connect: Connect = connect_file) -> sqlite3.Connection:
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
            db.executescript(f"BEGIN;{SCHEMA}COMMIT;")
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
    found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    return found is not None


def has_ledger(db: sqlite3.Connection) -> bool:
    """False where a crash came before the first commit of a journal."""
    return has_tables(db) and db.execute("SELECT 1 FROM meta").fetchone() is not None


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
