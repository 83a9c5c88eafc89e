"""A disk that takes its time to sync."""

import asyncio
import time

from dying_journal import open_journal
from fakes import make_group

from millrace.journal.segments import FileSink

SYNC_S = 0.05
ADMITTED, AT_ONCE = 40, 8


class SlowSink(FileSink):
    num_syncs = 0

    def sync(self) -> None:
        type(self).num_syncs += 1
        time.sleep(SYNC_S)


async def test_groups_share_the_syncs_of_a_slow_disk_which_holds_back_whoever_makes_them(tmp_path):
    SlowSink.num_syncs = 0
    journal = open_journal(tmp_path, open_sink=SlowSink)
    places = asyncio.Semaphore(AT_ONCE)  # as admission
    queued, turns = [0], 0

    async def play(number: int) -> None:
        async with places:
            journal.issued(number, draw=None)
            await journal.admitted(make_group(number))

    async def go_on() -> None:
        """The loop is never held up; what waits to be written is bounded by who may make it."""
        nonlocal turns
        while True:
            queued.append(journal._writer._queue.qsize())
            turns += 1
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(go_on())
    await asyncio.gather(*(play(number) for number in range(ADMITTED)))
    watching.cancel()
    await journal.close()
    assert SlowSink.num_syncs >= 3  # it was slow, and it was asked
    assert SlowSink.num_syncs < ADMITTED  # not once for each
    assert max(queued) <= 2 * AT_ONCE + 1  # Issued and Admitted of each, and the first snapshot
    assert turns > SlowSink.num_syncs
    assert journal.ledger.check() == []
    assert len(journal.ledger.waiting) == ADMITTED
