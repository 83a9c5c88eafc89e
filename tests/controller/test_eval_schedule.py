import asyncio
from contextlib import suppress
from unittest.mock import AsyncMock

import pytest
from fakes import make_update

from millrace.controller.evaluation import PinnedEvalScheduler, SharedEvalScheduler
from millrace.core.errors import WeightError
from millrace.weights.broadcaster import VersionBroadcaster


class PinnedEvaluations:
    """Pinned engines behind a broadcaster; swaps and evaluations end when the test says so."""

    def __init__(self, *, every_steps=2, steps=10, version=0):
        self.held, self.log = version, []
        self.may_swap, self.may_end = asyncio.Event(), asyncio.Semaphore(0)
        self.may_swap.set()
        self.trainer = AsyncMock()
        self.trainer.is_lost.return_value = False
        self.broadcaster = VersionBroadcaster(version=version)
        self.scheduler = PinnedEvalScheduler(
            swap=self._swap,
            evaluate=self._evaluate,
            every_steps=every_steps,
            steps=steps,
            version=version,
        )
        self.broadcaster.subscribe(self.scheduler.receive, wants=self.scheduler.wants)
        self.running = asyncio.create_task(self._run())

    async def _run(self):
        async with asyncio.TaskGroup() as activities:
            await self.scheduler.begin(activities)
            broadcasting = activities.create_task(self.broadcaster.run(self.trainer))
            await self.scheduler.finish()
            broadcasting.cancel()

    async def _swap(self, update):
        await self.may_swap.wait()
        if await self.trainer.is_lost(update):
            raise WeightError("gone")
        self.held = update.version
        return update.version

    async def _evaluate(self, step):
        self.log.append((step, self.held))
        await self.may_end.acquire()
        return f"evaluation of {self.held}"

    async def publish(self, *versions):
        for version in versions:
            self.broadcaster.publish(make_update(version))
            await settle()

    async def end_one(self):
        self.may_end.release()
        await settle()

    @property
    def released(self):
        return [call.args[0].version for call in self.trainer.release.call_args_list]


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def pinned():
    pinned = PinnedEvaluations()
    await settle()
    yield pinned
    pinned.running.cancel()
    with suppress(asyncio.CancelledError):
        await pinned.running


async def test_engines_receive_only_due_versions_and_keep_each_until_its_evaluation_ends(pinned):
    await pinned.end_one()
    await pinned.publish(1, 2)
    assert pinned.log == [(0, 0), (2, 2)]
    await pinned.publish(3)
    assert pinned.held == 2
    await pinned.end_one()
    await pinned.publish(4)
    assert pinned.log == [(0, 0), (2, 2), (4, 4)]


async def test_evaluation_due_during_another_uses_the_next_published_version(pinned):
    await pinned.publish(1, 2, 3)
    assert pinned.log == [(0, 0)]
    await pinned.end_one()
    await pinned.publish(5)
    await pinned.publish(6)
    assert pinned.log == [(0, 0), (5, 5)]
    await pinned.end_one()
    assert pinned.log == [(0, 0), (5, 5)]
    await pinned.publish(7)
    assert pinned.log == [(0, 0), (5, 5), (7, 7)]


async def test_last_version_is_evaluated_even_if_it_has_to_wait(pinned):
    await pinned.publish(9, 10)
    assert pinned.held == 0
    await pinned.end_one()
    assert pinned.held == 10
    await pinned.end_one()
    await pinned.running
    assert pinned.scheduler.before == "evaluation of 0"
    assert pinned.scheduler.after == "evaluation of 10"


async def test_bytes_are_kept_only_until_the_engines_have_them(pinned):
    await pinned.publish(1, 2)
    assert pinned.released == [1, 2]  # refused: an evaluation is running
    await pinned.end_one()
    pinned.may_swap.clear()
    await pinned.publish(3, 4)  # 3 is due, as 2 was missed
    assert pinned.released == [1, 2, 4]
    await pinned.publish(10)  # the last one, during the transfer of 3
    assert pinned.released == [1, 2, 4]
    pinned.may_swap.set()
    await settle()
    assert pinned.released == [1, 2, 4, 3]
    await pinned.end_one()
    assert pinned.released == [1, 2, 4, 3, 10]


async def test_version_lost_with_its_trainer_is_replaced_by_the_newest(pinned):
    await pinned.end_one()
    pinned.trainer.is_lost.side_effect = lambda update: update.version == 2
    pinned.trainer.borrow.return_value = make_update(3)
    await pinned.publish(2)
    assert pinned.log == [(0, 0), (3, 3)]
    assert pinned.released == [2, 3]


async def test_without_an_interval_only_first_and_last_version_are_evaluated():
    pinned = PinnedEvaluations(every_steps=0, steps=5, version=3)
    await pinned.end_one()
    await pinned.publish(4)
    assert pinned.log == [(3, 3)]
    await pinned.publish(5)
    await pinned.end_one()
    await pinned.running
    assert pinned.log == [(3, 3), (5, 5)]


class Log:
    """Evaluations that end when the test says so."""

    def __init__(self):
        self.began, self.ended = [], []
        self.may_end = asyncio.Event()

    async def evaluate(self, step):
        self.began.append(step)
        await self.may_end.wait()
        self.ended.append(step)
        return step


async def test_evaluations_on_shared_engines_run_beside_the_steps():
    log = Log()
    scheduler = SharedEvalScheduler(evaluate=log.evaluate, every_steps=2, steps=5, version=0)
    async with asyncio.TaskGroup() as activities:
        log.may_end.set()
        await scheduler.begin(activities)
        assert (scheduler.before, log.ended) == (0, [0])
        log.may_end.clear()
        for version in range(1, 5):
            await scheduler.after_step(version)
        await settle()
        assert log.began == [0, 2, 4]
        assert log.ended == [0]
        log.may_end.set()
        await scheduler.finish()
    assert scheduler.after == 5
    assert sorted(log.ended) == [0, 2, 4, 5]


async def test_synchronous_evaluations_wait_for_their_version_and_training_waits_for_them():
    log, visible = Log(), []

    async def reached(version):
        visible.append(version)

    scheduler = SharedEvalScheduler(
        evaluate=log.evaluate, every_steps=1, steps=5, version=0, reached=reached
    )
    stepping = asyncio.create_task(scheduler.after_step(1))
    await settle()
    assert (visible, log.began, stepping.done()) == ([1], [1], False)
    log.may_end.set()
    await stepping
    assert log.ended == [1]
