"""A test process that writes a journal and is killed at a chosen moment of a commit.

    python killed_journal.py FOLDER MOMENT NUMBER

NUMBER chooses the commit that contains this group. MOMENT is "before commit" (its changes are
executed), "in write" (some of them are written to the log) or "after commit" (they are committed,
but not acknowledged).
"""

import asyncio
import os
import resource
import signal
import sqlite3
import sys
from pathlib import Path

from fakes import make_group

from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.database import NAME, connect_file

WRITTEN_BYTES = 1000  # of the first page; then the kernel kills the process


class KillingConnection(sqlite3.Connection):
    folder: Path
    moment: str
    number: int

    def commit(self) -> None:
        sql = "SELECT 1 FROM groups WHERE number = ?"
        is_due = self.execute(sql, (self.number,)).fetchone() is not None
        if is_due and self.moment == "before commit":
            _die()
        if is_due and self.moment == "in write":
            log = (self.folder / f"{NAME}-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (log + WRITTEN_BYTES,) * 2)
            print("dies", flush=True)
        super().commit()
        if is_due:
            _die()


def _die() -> None:
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def open_journal(folder: Path, *, factory=None) -> Journal:
    def connect(path: str) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=factory)

    history = read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    return Journal(
        folder,
        history=history,
        task_of=lambda number, _draw: Task(prompt=str(number)),
        settings=JournalConfig(),
        commit_interval_s=0,
        connect=connect_file if factory is None else connect,
    )


async def main(folder: Path, moment: str, last: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # exceeding the file size limit kills
    KillingConnection.folder, KillingConnection.moment = folder, moment
    KillingConnection.number = last
    journal = open_journal(folder, factory=KillingConnection)
    number, version = 0, 0
    while True:
        for _ in range(2):
            journal.issue_task(number, draw=None)
            await journal.admit_group(make_group(number))
            print("admitted", number, flush=True)
            number += 1
        version += 1
        await journal.begin_step(version, fresh=[number - 2, number - 1])
        print("begun", version, flush=True)
        journal.finish_step(version, was_skipped=False)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
