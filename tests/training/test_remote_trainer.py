import asyncio

import numpy as np
import pytest
from batches import batch_of, mixed_rollouts

from millrace.cluster.messages import (
    Copied,
    Done,
    Lend,
    Lent,
    Release,
    SaveCheckpoint,
    Saved,
    Stepped,
    TrainStep,
)
from millrace.core.errors import CheckpointError, WorkerError
from millrace.core.weight_update import WeightUpdate
from millrace.training.past_steps import StepsInMemory
from millrace.training.remote import RemoteTrainer

BATCH = batch_of(mixed_rollouts(np.random.default_rng(0)))


def make_update(version):
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )


class FakeWorker:
    """Does what it is asked until it shall die over a kind of message."""

    name = "trainer"

    def __init__(self, *, version=0, dies_at=None, stumbles_at=None, copies=False) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self.version = version
        self.dies_at, self.stumbles_at = dies_at, stumbles_at
        self.copies = copies  # a checkpoint's state, before anything else becomes of it
        self.asked = []

    async def call(self, message, *, on_part=None, **settings):
        self.asked.append(message)
        if self.copies:
            on_part(Copied())
        error = WorkerError("It failed.", worker=self.name)
        if isinstance(message, self.stumbles_at or ()):
            raise error
        if isinstance(message, self.dies_at or ()):
            asyncio.get_running_loop().call_soon(self.dead.set_result, error)
            raise error
        match message:
            case TrainStep():
                assert message.version == self.version + 1
                self.version += 1
                return Stepped(version=message.version, metrics={})
            case Lend():
                return Lent(update=make_update(self.version))
            case SaveCheckpoint():
                return Saved(version=self.version)
            case _:
                return Done()

    @property
    def steps(self):
        return [(m.version, m.publish) for m in self.asked if isinstance(m, TrainStep)]


def make_trainer(worker, *, version=0) -> RemoteTrainer:
    return RemoteTrainer(worker, past=StepsInMemory(version=version))


def save(trainer, directory, *, is_last):
    return trainer.save(directory, run_state={}, is_last=is_last, on_copied=lambda: None)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_step_in_flight_at_the_death_is_done_once_after_those_since_the_checkpoint():
    first = FakeWorker()
    trainer = make_trainer(first)
    for version in (1, 2):
        await trainer.step(BATCH, version=version)
    first.dies_at = TrainStep
    stepping = asyncio.create_task(trainer.step(BATCH, BATCH, version=3))
    await settle()
    assert not stepping.done()
    second = FakeWorker(version=1)
    newest = await trainer.replace(second, version=1)  # pyright: ignore
    assert newest.version == 2
    assert (await stepping).version == 3
    assert second.steps == [(2, False), (3, True)]
    assert trainer.num_redone == 1


async def test_an_error_of_a_living_trainer_is_raised():
    trainer = make_trainer(FakeWorker(stumbles_at=TrainStep))
    with pytest.raises(WorkerError, match="It failed"):
        await trainer.step(BATCH, version=1)


async def test_what_a_dead_trainer_published_is_lost_and_no_business_of_the_next():
    first = FakeWorker()
    trainer = make_trainer(first)
    old = make_update(0)
    trainer.published(old)
    assert not await trainer.is_lost(old)
    first.dead.set_result(WorkerError("It died.", worker="trainer"))
    trainer.lose()
    await trainer.release(old)
    second = FakeWorker()
    lent = await trainer.replace(second, version=0)  # pyright: ignore
    assert await trainer.is_lost(old)
    await trainer.release(old)
    assert not any(isinstance(message, Release) for message in second.asked)
    await trainer.release(lent)
    assert isinstance(second.asked[-1], Release)


@pytest.mark.parametrize(("is_copied", "is_last"), [(False, False), (True, True)])
async def test_a_checkpoint_is_asked_for_again_of_a_trainer_that_stands_where_it_was_to_be_made(
    tmp_path, is_copied, is_last
):
    trainer = make_trainer(FakeWorker(dies_at=SaveCheckpoint, copies=is_copied))
    saving = asyncio.create_task(save(trainer, tmp_path, is_last=is_last))
    await settle()
    second = FakeWorker()
    await trainer.replace(second, version=0)  # pyright: ignore
    await saving
    assert isinstance(second.asked[-1], SaveCheckpoint)


async def test_a_checkpoint_that_steps_may_have_overtaken_is_lost_with_its_trainer(tmp_path):
    trainer = make_trainer(FakeWorker(dies_at=SaveCheckpoint, copies=True))
    saving = asyncio.create_task(save(trainer, tmp_path, is_last=False))
    await settle()
    second = FakeWorker()
    await trainer.replace(second, version=0)  # pyright: ignore
    with pytest.raises(CheckpointError, match="The trainer died before"):
        await saving
    assert not any(isinstance(message, SaveCheckpoint) for message in second.asked)
