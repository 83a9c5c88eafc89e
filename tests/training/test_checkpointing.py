"""The controller's side of checkpoints, with a trainer that the test plays."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from millrace.cluster.messages import Copied, Message, SaveCheckpoint, Saved
from millrace.controller.checkpointing import Checkpointing
from millrace.core.errors import CheckpointError, MillraceError, WorkerError
from millrace.training.group import StepsInMemory, TrainerGroup


class FakeTrainer:
    """Says Copied at once and is silent about the disk until the test answers."""

    def __init__(self) -> None:
        self.asked: list[SaveCheckpoint] = []
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[Message | MillraceError] = asyncio.Queue()

    async def call(self, message, *, on_part, **_: object) -> Message:
        self.asked.append(message)
        on_part(Copied())
        answer = await self.answers.get()
        if isinstance(answer, MillraceError):
            raise answer
        return answer


@pytest.fixture
async def trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def saved() -> list[int]:
    return []


@pytest.fixture
def checkpointing(trainer, warnings, saved) -> Checkpointing:
    group = TrainerGroup([trainer], past=StepsInMemory(version=0))
    return Checkpointing(group, folder=Path("run"), warn=warnings.append)


@pytest.fixture
def save(checkpointing, saved):
    """Of checkpoints of a version; the last one, or any other."""

    def save(version: int, *, is_last: bool = False):
        on_saved = partial(saved.append, version)
        return checkpointing.save(version, run_state={}, on_saved=on_saved, is_last=is_last)

    return save


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_save_returns_before_the_checkpoint_is_on_the_disk(
    trainer, checkpointing, save, saved, warnings
):
    await save(4)
    assert [message.directory for message in trainer.asked] == ["run/step_4"]
    assert saved == []
    assert checkpointing.newest is None
    trainer.answers.put_nowait(Saved(version=4))
    await settled()
    assert saved == [4]
    assert checkpointing.newest == Path("run/step_4")
    assert warnings == []


async def test_a_checkpoint_due_while_another_is_written_is_skipped_and_counted(
    trainer, checkpointing, save, saved, warnings
):
    for version in (1, 2, 3):
        await save(version)
    assert checkpointing.num_skipped == len(warnings) == 2
    assert warnings[1].startswith(
        "The checkpoint of step 3 was skipped because that of step 1 is still being written"
        " (2 skipped so far)"
    )
    trainer.answers.put_nowait(Saved(version=1))
    await settled()
    await save(4)
    assert [message.directory for message in trainer.asked] == ["run/step_1", "run/step_4"]
    checkpointing.close()


async def test_the_last_checkpoint_waits_for_the_one_before_and_for_the_disk(
    trainer, checkpointing, save, saved
):
    await save(1)
    last = asyncio.create_task(save(2, is_last=True))
    await settled()
    assert len(trainer.asked) == 1
    trainer.answers.put_nowait(Saved(version=1))
    await settled()
    assert len(trainer.asked) == 2
    assert not last.done()
    trainer.answers.put_nowait(Saved(version=2))
    await last
    assert checkpointing.newest == Path("run/step_2")
    assert saved == [1, 2]


@pytest.mark.parametrize(
    "error", [CheckpointError("No room."), WorkerError("Worker 'trainer' died.", worker="trainer")]
)
async def test_a_failed_write_is_a_warning_unless_it_is_the_last(
    trainer, checkpointing, save, saved, warnings, error
):
    await save(1)
    trainer.answers.put_nowait(error)
    while not warnings:
        await settled()
    assert warnings == [f"{error} The run continues without the checkpoint of step 1."]
    trainer.answers.put_nowait(error)
    with pytest.raises(type(error), match=str(error)):
        await save(2, is_last=True)
    assert saved == []


async def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    trainer, checkpointing, save, saved, warnings
):
    trainer.answers.put_nowait(Saved(version=1, complaint="It is locked."))
    await save(1, is_last=True)
    assert (saved, warnings) == ([1], ["It is locked."])


async def test_a_checkpoint_lost_with_its_trainer_is_not_written_by_the_next(
    trainer, checkpointing, save, saved, warnings
):
    await save(1)
    trainer.dead.set_result(None)
    trainer.answers.put_nowait(WorkerError("Worker 'trainer' was killed.", worker="trainer"))
    while not warnings:
        await settled()
    assert warnings[0].startswith("The trainer died before 'run/step_1' was written.")
    assert (saved, len(trainer.asked)) == ([], 1)
