"""A disk for tests that loses power: unacknowledged writes arrive in part, in any order.

It models what SQLite may rely on: a sync returns when everything before it is on the disk. Between
two syncs any sector of what was written may be old, new or garbage.
"""

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from millrace.journal.database import BUSY_TIMEOUT_S, NAME

SECTOR = 512
WAL_HEADER = 32
CHECKPOINT_PAGES = 4  # so that even short tests see the log begin anew


@dataclass(frozen=True, kw_only=True)
class Files:
    database: bytes = b""
    wal: bytes = b""


class CrashingDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits_left: int | None = None  # then power is lost during the next; None = never
        self._stable: Files | None = None  # when the last commit was acknowledged
        self._torn: Files | None = None  # after the commit during which power was lost

    def connect(self, path: str) -> sqlite3.Connection:
        self._stable = self._read()
        connection = sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=CrashingConnection,
        )
        connection.disk = self
        return connection

    def commit(self, connection: "CrashingConnection") -> None:
        if self.commits_left == 0:
            connection.commit_really()
            self._torn = self._torn or self._read()
            raise sqlite3.OperationalError("the power was lost")
        if self.commits_left is not None:
            self.commits_left -= 1
        connection.commit_really()
        self._stable = self._read()

    def copy_acknowledged(self, folder: Path) -> None:
        """What is certain to survive a crash. The files may hold more, of the commit during which
        power was lost."""
        assert self._stable is not None
        _write(self._stable, folder)

    def crash(self, seed: int) -> None:
        """Leave on the disk what a loss of power may leave. The connections are closed."""
        rng = random.Random(seed)
        assert self._stable is not None
        left = self._stable if self._torn is None else _mixed(self._stable, self._torn, rng)
        for path in self.folder.iterdir():
            path.unlink()
        _write(left, self.folder)
        self._torn = self.commits_left = None

    def _read(self) -> Files:
        paths = (self.folder / NAME, self.folder / f"{NAME}-wal")
        database, wal = (path.read_bytes() if path.exists() else b"" for path in paths)
        return Files(database=database, wal=wal)


class CrashingConnection(sqlite3.Connection):
    disk: CrashingDisk

    def execute(self, sql: str, *parameters) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA wal_autocheckpoint"):
            sql = f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}"
        return super().execute(sql, *parameters)

    def commit(self) -> None:
        self.disk.commit(self)

    def commit_really(self) -> None:
        super().commit()


def _write(files: Files, folder: Path) -> None:
    (folder / NAME).write_bytes(files.database)
    if files.wal:
        (folder / f"{NAME}-wal").write_bytes(files.wal)


def _mixed(old: Files, new: Files, rng: random.Random) -> Files:
    if new.database != old.database:
        # The log was synced before it was copied into the database.
        return Files(database=_mixed_bytes(old.database, new.database, rng), wal=new.wal)
    header = new.wal[:WAL_HEADER]
    if header == old.wal[:WAL_HEADER]:
        return Files(database=old.database, wal=_mixed_bytes(old.wal, new.wal, rng))
    if rng.random() < 0.5:
        return old
    # A log that begins anew has its header synced before anything follows it.
    rest = _mixed_bytes(old.wal[WAL_HEADER:], new.wal[WAL_HEADER:], rng)
    return Files(database=old.database, wal=header + rest)


def _mixed_bytes(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Each sector as it was or as it is now; some that changed hold garbage."""
    shorter, longer = sorted((len(old), len(new)))
    found = bytearray()
    for at in range(0, rng.randint(shorter, longer), SECTOR):
        was, now = old[at : at + SECTOR], new[at : at + SECTOR]
        sector = bytearray(rng.choice((was or now, now or was)))
        if was != now and not was and rng.random() < 0.1:
            sector[rng.randrange(len(sector))] ^= 1 + rng.randrange(255)
        found += sector
    return bytes(found)
