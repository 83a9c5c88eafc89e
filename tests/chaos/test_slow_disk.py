"""A disk that takes its time to sync."""

import asyncio
import sqlite3
import time

from dying_journal import open_journal
from fakes import make_group

COMMIT_S = 0.05
ADMITTED, AT_ONCE = 40, 8


class SlowConnection(sqlite3.Connection):
    def commit(self) -> None:
        time.sleep(COMMIT_S)
        super().commit()


async def test_groups_share_the_commits_of_a_slow_disk_which_never_blocks_the_loop(tmp_path):
    journal = open_journal(tmp_path, factory=SlowConnection)
    places = asyncio.Semaphore(AT_ONCE)  # as admission
    queued, turns = [0], 0

    async def play(number: int) -> None:
        async with places:
            journal.issue_task(number, draw=None)
            await journal.admit_group(make_group(number))

    async def observe() -> None:
        nonlocal turns
        while True:
            queued.append(journal._writer._queue.qsize())
            turns += 1
            await asyncio.sleep(0.001)

    observing = asyncio.create_task(observe())
    await asyncio.gather(*(play(number) for number in range(ADMITTED)))
    observing.cancel()
    await journal.close()
    num_commits = journal._writer.num_commits
    assert num_commits >= 3
    assert num_commits < ADMITTED  # not one for each
    assert max(queued) <= 2 * AT_ONCE + 1  # two changes of each, and the first of the journal
    assert turns > num_commits
    assert journal.ledger.check() == []
    assert len(journal.ledger.waiting) == ADMITTED
