import asyncio
from contextlib import suppress

import pytest

from millrace.controller.eval_schedule import PinnedEvalScheduler, SharedEvalScheduler
from millrace.core.weight_update import WeightUpdate


def make_update(version):
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )


class Exam:
    """An examiner whose swaps and evaluations end when the test says so."""

    def __init__(self, *, every_steps=2, steps=10, version=0):
        self.held, self.log = version, []
        self.may_swap, self.may_end = asyncio.Event(), asyncio.Semaphore(0)
        self.may_swap.set()
        self.examiner = PinnedEvalScheduler(
            swap=self._swap,
            examine=self._examine,
            every_steps=every_steps,
            steps=steps,
            version=version,
        )
        self.running = asyncio.create_task(self._run())

    async def _run(self):
        async with asyncio.TaskGroup() as activities:
            await self.examiner.begin(activities)
            await self.examiner.conclude()

    async def _swap(self, update):
        await self.may_swap.wait()
        self.held = update.version
        return update.version

    async def _examine(self, step):
        self.log.append((step, self.held))
        await self.may_end.acquire()
        return f"evaluation of {self.held}"

    async def publish(self, *versions):
        for version in versions:
            self.examiner.submit(make_update(version))
            await settle()

    async def end_one(self):
        self.may_end.release()
        await settle()

    async def is_done_with(self, version):
        try:
            await asyncio.wait_for(asyncio.shield(self.examiner.done_with(version)), 0.01)
        except TimeoutError:
            return False
        return True


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def exam():
    exam = Exam()
    await settle()
    yield exam
    exam.running.cancel()
    with suppress(asyncio.CancelledError):
        await exam.running


async def test_only_versions_that_are_due_are_fetched_and_each_is_held_to_the_end(exam):
    await exam.end_one()
    await exam.publish(1, 2)
    assert exam.log == [(0, 0), (2, 2)]
    await exam.publish(3)
    assert exam.held == 2
    await exam.end_one()
    await exam.publish(4)
    assert exam.log == [(0, 0), (2, 2), (4, 4)]


async def test_what_falls_due_during_an_evaluation_is_made_up_for_by_the_next_version(exam):
    await exam.publish(1, 2, 3)
    assert exam.log == [(0, 0)]
    await exam.end_one()
    await exam.publish(5)
    await exam.publish(6)
    assert exam.log == [(0, 0), (5, 5)]
    await exam.end_one()
    assert exam.log == [(0, 0), (5, 5)]
    await exam.publish(7)
    assert exam.log == [(0, 0), (5, 5), (7, 7)]


async def test_the_last_version_is_evaluated_even_if_it_has_to_wait(exam):
    await exam.publish(9, 10)
    assert exam.held == 0
    await exam.end_one()
    assert exam.held == 10
    await exam.end_one()
    await exam.running
    assert exam.examiner.before == "evaluation of 0"
    assert exam.examiner.after == "evaluation of 10"


async def test_bytes_are_needed_only_until_the_engines_have_them(exam):
    await exam.publish(1, 2)
    assert await exam.is_done_with(2)  # not accepted: an evaluation is under way
    await exam.end_one()
    exam.may_swap.clear()
    await exam.publish(4)
    assert not await exam.is_done_with(4)
    assert await exam.is_done_with(3)
    await exam.publish(10)  # comes while 4 is being fetched
    assert not await exam.is_done_with(4)
    assert not await exam.is_done_with(10)
    exam.may_swap.set()
    await settle()
    assert await exam.is_done_with(4)
    assert not await exam.is_done_with(10)
    await exam.end_one()
    assert await exam.is_done_with(10)


async def test_without_an_interval_only_the_first_and_the_last_are_evaluated():
    exam = Exam(every_steps=0, steps=5, version=3)
    await exam.end_one()
    await exam.publish(4)
    assert exam.log == [(3, 3)]
    await exam.publish(5)
    await exam.end_one()
    await exam.running
    assert exam.log == [(3, 3), (5, 5)]


class Log:
    """Evaluations that end when the test says so."""

    def __init__(self):
        self.began, self.ended = [], []
        self.may_end = asyncio.Event()

    async def examine(self, step):
        self.began.append(step)
        await self.may_end.wait()
        self.ended.append(step)
        return step


async def test_evaluations_on_shared_engines_run_beside_the_steps():
    log = Log()
    examiner = SharedEvalScheduler(examine=log.examine, every_steps=2, steps=5, version=0)
    async with asyncio.TaskGroup() as activities:
        log.may_end.set()
        await examiner.begin(activities)
        assert (examiner.before, log.ended) == (0, [0])
        log.may_end.clear()
        for version in range(1, 5):
            await examiner.after_step(version)
        await settle()
        assert log.began == [0, 2, 4]
        assert log.ended == [0]
        await examiner.done_with(2)
        log.may_end.set()
        await examiner.conclude()
    assert examiner.after == 5
    assert sorted(log.ended) == [0, 2, 4, 5]


async def test_evaluations_in_turns_wait_for_their_version_and_training_for_them():
    log, visible = Log(), []

    async def wait_visible(version):
        visible.append(version)

    examiner = SharedEvalScheduler(
        examine=log.examine, every_steps=1, steps=5, version=0, in_turns=wait_visible
    )
    stepping = asyncio.create_task(examiner.after_step(1))
    await settle()
    assert (visible, log.began, stepping.done()) == ([1], [1], False)
    log.may_end.set()
    await stepping
    assert log.ended == [1]
