"""Engines on the trainer's GPUs, lent or kept asleep between two steps."""

import asyncio
from dataclasses import dataclass, field

from fakes import ScriptedEngine

from millrace.core.records import WeightUpdate
from millrace.inference.lending import GpuLending
from millrace.inference.pool import EnginePool


class SleepyEngine(ScriptedEngine):
    """Needs a while to sleep and to wake up."""

    def __init__(self, *, sleep_s=0.0, wake_s=0.0):
        super().__init__("x")
        self.sleep_s, self.wake_s = sleep_s, wake_s
        self.events: list[str] = []

    async def pause(self, *, sleep=False):
        await asyncio.sleep(self.sleep_s)
        self.events.append("sleep" if sleep else "pause")

    async def resume(self):
        await asyncio.sleep(self.wake_s)
        self.events.append("wake")

    async def swap(self, update):
        self.events.append(f"swap {update.version}")
        return update.version


@dataclass
class Rig:
    """One lent engine, and another if there is one."""

    lent: SleepyEngine
    other: SleepyEngine = field(default_factory=SleepyEngine)
    reports: list[str] = field(default_factory=list)

    async def build(self, *, alone=False) -> GpuLending:
        self.pool = EnginePool(replaces=True)

        async def load_newest(engine):
            engine.events.append("load newest")

        await self.pool.join(self.lent, prepare=None, is_lent=True, load_newest=load_newest)
        if not alone:
            await self.pool.join(self.other, prepare=None)
        report = self.reports.append
        return GpuLending(pools=[self.pool], sleeps=True, optional=self.pool, report=report)

    async def swap(self, version: int) -> int:
        update = WeightUpdate(
            version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
        )
        return await self.pool.swap(update)


async def steps(lending, waits_s, *, after=lambda: asyncio.sleep(0)):
    """Steps with these waits after them."""
    async with asyncio.TaskGroup() as activities:
        for wait_s in waits_s:
            await lending.take_back()
            await lending.lend(activities)
            await after()
            await asyncio.sleep(wait_s)
        await lending.finish()


async def test_waits_shorter_than_a_sleep_and_a_wake_leave_the_engine_asleep():
    rig = Rig(SleepyEngine(sleep_s=0.1, wake_s=0.1))
    lending = await rig.build()
    await steps(lending, [0.01] * 5)
    assert rig.lent.events == ["sleep", "wake", "sleep", "wake", "load newest"]
    assert (lending.num_lent, lending.num_kept) == (1, 4)
    assert lending.metrics == {"lending/lent": 1.0, "lending/kept_asleep": 4.0}
    (sentence,) = rig.reports
    assert "they stay asleep until it waits for longer" in sentence


async def test_waits_longer_than_a_sleep_and_a_wake_lend_the_gpu():
    rig = Rig(SleepyEngine(sleep_s=0.01, wake_s=0.01))
    lending = await rig.build()
    await steps(lending, [0.1] * 4)
    assert rig.lent.events == ["sleep", "wake"] * 4
    assert (lending.num_lent, lending.num_kept, rig.reports) == (4, 0, [])


async def test_an_engine_that_was_kept_wakes_with_the_newest_weights_when_the_wait_gets_long():
    rig = Rig(SleepyEngine(sleep_s=0.1, wake_s=0.1))
    lending = await rig.build()
    versions = iter(range(1, 9))

    async def publish():
        version = next(versions)
        assert await rig.swap(version) == version, "visible without the engine that sleeps"

    await steps(lending, [0.01, 0.01, 0.01, 0.8], after=publish)
    # The first step lends, and the wake is under way when version 1 arrives.
    assert rig.lent.events == ["sleep", "swap 1", "wake", "sleep", "wake", "load newest"]
    assert rig.other.events == ["swap 1", "swap 2", "swap 3", "swap 4"]
    assert (lending.num_lent, lending.num_kept) == (2, 2)


async def test_the_only_engine_is_always_lent():
    rig = Rig(SleepyEngine(sleep_s=0.1, wake_s=0.1))
    lending = await rig.build(alone=True)
    await steps(lending, [0.01] * 3)
    assert rig.lent.events == ["sleep", "wake"] * 3


async def test_steps_wait_for_the_engine_to_stop_and_without_sleep_it_always_resumes():
    rig = Rig(SleepyEngine(sleep_s=0.05, wake_s=0.05))
    await rig.build()
    lending = GpuLending(pools=[rig.pool])
    await steps(lending, [0.0] * 2)
    assert rig.lent.events == ["pause", "wake"] * 2
    assert lending.metrics == {}
