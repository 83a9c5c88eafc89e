"""A process for tests that writes a journal and is killed by its own disk at a chosen moment.

    python dying_journal.py FOLDER MOMENT NUMBER

MOMENT of the commit that holds the group of NUMBER: "in write" = half of it is written; "before
sync" = all of it, and nothing is known to be on the disk; "after sync" = it is, and nobody has been
told.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fakes import make_group

from millrace.cluster.wire import Frame
from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.segments import FileSink

SETTINGS = JournalConfig(commit_interval_s=0)


class DyingSink(FileSink):
    def __init__(self, path: Path, *, moment: str, number: int) -> None:
        super().__init__(path)
        self._moment = moment
        self._groups_left = number + 1

    def write(self, parts: Sequence[Frame]) -> None:
        data = b"".join(parts)
        self._groups_left -= data.count(b"Admitted")
        if self._is_due("in write"):
            super().write([data[: len(data) // 2]])
            _die()
        super().write(parts)

    def sync(self) -> None:
        if self._is_due("before sync"):
            _die()
        super().sync()
        if self._is_due("after sync"):
            _die()

    def _is_due(self, moment: str) -> bool:
        return moment == self._moment and self._groups_left == 0


def _die() -> None:
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def open_journal(folder: Path, **more) -> Journal:
    past = read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    return Journal(
        folder,
        past=past,
        task_of=lambda number, _draw: Task(prompt=str(number)),
        settings=SETTINGS,
        **more,
    )


async def main(folder: Path, moment: str, last: int) -> None:
    def open_sink(path: Path) -> DyingSink:
        return DyingSink(path, moment=moment, number=last)

    journal = open_journal(folder, open_sink=open_sink)
    number, version = 0, 0
    while True:
        for _ in range(2):
            journal.issued(number, draw=None)
            await journal.admitted(make_group(number))
            print("admitted", number, flush=True)
            number += 1
        version += 1
        await journal.begun(version, fresh=[number - 2, number - 1])
        print("begun", version, flush=True)
        journal.applied(version, was_skipped=False)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
