import asyncio
import contextlib

from millrace.controller.admission import Admission, SyncBarrier
from millrace.core.staleness import StalenessLimit


class Rig:
    """Groups that wait at the barrier, and the rounds in which they began."""

    def __init__(self, *, groups_per_step: int, max_running: int = 100):
        self.admission = Admission(
            groups_per_step=groups_per_step,
            limit=StalenessLimit(max_staleness=0),
            max_running=max_running,
            version=0,
        )
        self.begun: list[list[int]] = []
        self.barrier = SyncBarrier(self.admission, together=self.together)

    @contextlib.asynccontextmanager
    async def together(self):
        self.begun.append([])
        yield
        await asyncio.sleep(0)

    async def start(self, number: int) -> asyncio.Task:
        await self.admission.enter()

        async def play():
            await self.barrier.wait()
            self.begun[-1].append(number)

        return asyncio.create_task(play())


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_round_starts_in_order_when_every_group_that_may_run_waits():
    rig = Rig(groups_per_step=3)
    running = asyncio.create_task(rig.barrier.run())
    rig.barrier.open()
    for number in range(2):
        await rig.start(number)
    await settle()
    assert rig.begun == []
    await rig.start(2)
    await settle()
    assert rig.begun == [[0, 1, 2]]
    running.cancel()


async def test_no_round_starts_while_the_barrier_is_closed():
    rig = Rig(groups_per_step=1)
    running = asyncio.create_task(rig.barrier.run())
    await rig.start(0)
    await settle()
    assert rig.begun == []
    rig.barrier.open()
    await settle()
    assert rig.begun == [[0]]
    running.cancel()


async def test_replacement_of_a_failed_group_waits_until_no_other_group_runs():
    rig = Rig(groups_per_step=2)
    running = asyncio.create_task(rig.barrier.run())
    rig.barrier.open()
    for number in range(2):
        await rig.start(number)
    await settle()
    rig.admission.give_back()  # the first fails while the second is being scored
    rig.admission.leave()
    await rig.start(2)
    await settle()
    assert rig.begun == [[0, 1]]
    rig.admission.leave()
    await settle()
    assert rig.begun == [[0, 1], [2]]
    running.cancel()


async def test_group_cancelled_at_the_barrier_is_not_waited_for():
    rig = Rig(groups_per_step=2)
    running = asyncio.create_task(rig.barrier.run())
    rig.barrier.open()
    first = await rig.start(0)
    await settle()
    first.cancel()
    await settle()
    rig.admission.give_back()
    rig.admission.leave()
    for number in (1, 2):
        await rig.start(number)
    await settle()
    assert rig.begun == [[1, 2]]
    running.cancel()
