import asyncio

import pytest

from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.core.errors import RunFailed


class Rig:
    def __init__(self, *, limit_s: float) -> None:
        self.warnings: list[str] = []
        self.moved = 0
        self.stalls = StallWatchdog(
            warn_after_s=0.02,
            limit_s=limit_s,
            explain=lambda: "the trainer waits for generation.",
            moved=lambda: self.moved,
            warn=self.warnings.append,
        )


async def test_stall_is_reported_ever_more_rarely_and_then_ends_the_run():
    rig = Rig(limit_s=0.1)
    with pytest.raises(RunFailed, match=r"No step completed for 0.1 s .*waits for generation"):
        await rig.stalls.until(asyncio.Event().wait())
    reported = [warning.partition(":")[0] for warning in rig.warnings]
    assert reported == [f"No step completed for {s} s" for s in (0.02, 0.04, 0.08)]


async def test_other_signs_of_progress_restart_the_clock():
    rig = Rig(limit_s=0.1)

    async def work():
        for _ in range(4):
            await asyncio.sleep(0.06)
            rig.moved += 1
        return "done"

    assert await rig.stalls.until(work()) == "done"


async def test_cancelling_the_wait_cancels_the_work():
    rig = Rig(limit_s=10)
    work = asyncio.create_task(asyncio.Event().wait())
    waiting = asyncio.create_task(rig.stalls.until(work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.cancelled()


async def test_an_error_of_the_work_is_raised():
    async def work():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Rig(limit_s=1).stalls.until(work())
