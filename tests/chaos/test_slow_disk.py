"""A journal on a disk with slow commits."""

import asyncio
import sqlite3
import time

from fakes import make_group
from killed_journal import open_journal

COMMIT_S = 0.05
ADMITTED, CONCURRENT = 40, 8


class SlowConnection(sqlite3.Connection):
    def commit(self) -> None:
        time.sleep(COMMIT_S)
        super().commit()


async def test_groups_share_slow_commits_without_blocking_the_event_loop(tmp_path):
    journal = open_journal(tmp_path, factory=SlowConnection)
    slots = asyncio.Semaphore(CONCURRENT)  # in place of admission
    queued, turns = [0], 0

    async def admit(number: int) -> None:
        async with slots:
            journal.issue_task(number, draw=None)
            await journal.admit_group(make_group(number))

    async def observe() -> None:
        nonlocal turns
        while True:
            queued.append(journal._writer._queue.qsize())
            turns += 1
            await asyncio.sleep(0.001)

    observing = asyncio.create_task(observe())
    await asyncio.gather(*(admit(number) for number in range(ADMITTED)))
    observing.cancel()
    await journal.close()
    num_commits = journal._writer.num_commits
    assert num_commits >= 3
    assert num_commits < ADMITTED  # fewer than one per group
    assert max(queued) <= 2 * CONCURRENT + 1  # two changes per group, and the journal's first one
    assert turns > num_commits
    assert journal.ledger.check() == []
    assert len(journal.ledger.waiting) == ADMITTED
