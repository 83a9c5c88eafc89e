"""The controller's side of checkpoints, with a trainer that the test plays."""

import asyncio
from pathlib import Path

import pytest

from millrace.cluster.messages import Copied, Message, SaveCheckpoint, Saved
from millrace.core.errors import CheckpointError, MillraceError, WorkerError
from millrace.training.checkpointing import Checkpointing
from millrace.training.remote import RemoteTrainer


class PlayedTrainer:
    """Says Copied at once and is silent about the disk until the test answers."""

    def __init__(self) -> None:
        self.asked: list[SaveCheckpoint] = []
        self.answers: asyncio.Queue[Message | MillraceError] = asyncio.Queue()

    async def call(self, message, *, timeout_s=None, on_part=None) -> Message:
        self.asked.append(message)
        on_part(Copied())
        answer = await self.answers.get()
        if isinstance(answer, MillraceError):
            raise answer
        return answer


@pytest.fixture
def trainer() -> PlayedTrainer:
    return PlayedTrainer()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def heard() -> list[int]:
    return []


@pytest.fixture
def checkpointing(trainer, said, heard) -> Checkpointing:
    return Checkpointing(
        RemoteTrainer(trainer), folder=Path("run"), warn=said.append, on_saved=heard.append
    )


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_controller_goes_on_before_the_disk_has_it(trainer, checkpointing, heard, said):
    await checkpointing.save(4, run_state={"version": 4})
    assert [message.directory for message in trainer.asked] == ["run/step_4"]
    assert heard == []
    assert checkpointing.newest is None
    trainer.answers.put_nowait(Saved(version=4))
    await settled()
    assert heard == [4]
    assert checkpointing.newest == Path("run/step_4")
    assert said == []


async def test_one_that_is_due_while_another_is_written_is_skipped_and_counted(
    trainer, checkpointing, heard, said
):
    for version in (1, 2, 3):
        await checkpointing.save(version, run_state={})
    assert checkpointing.num_skipped == len(said) == 2
    assert said[1].startswith(
        "The checkpoint of step 3 was skipped, because that of step 1 is still being written"
        " (2 skipped so far)"
    )
    trainer.answers.put_nowait(Saved(version=1))
    await settled()
    await checkpointing.save(4, run_state={})
    assert [message.directory for message in trainer.asked] == ["run/step_1", "run/step_4"]
    checkpointing.close()


async def test_the_last_one_waits_for_the_one_before_and_for_the_disk(
    trainer, checkpointing, heard
):
    await checkpointing.save(1, run_state={})
    last = asyncio.create_task(checkpointing.save_last(2, run_state={}))
    await settled()
    assert len(trainer.asked) == 1
    trainer.answers.put_nowait(Saved(version=1))
    await settled()
    assert len(trainer.asked) == 2
    assert not last.done()
    trainer.answers.put_nowait(Saved(version=2))
    assert await last == checkpointing.newest == Path("run/step_2")
    assert heard == [1, 2]


@pytest.mark.parametrize(
    "error", [CheckpointError("No room."), WorkerError("Worker 'trainer' died.", worker="trainer")]
)
async def test_a_failed_write_is_a_warning_unless_it_is_the_last(
    trainer, checkpointing, heard, said, error
):
    await checkpointing.save(1, run_state={})
    trainer.answers.put_nowait(error)
    await settled()
    assert said == [f"{error} The run goes on without the checkpoint of step 1."]
    trainer.answers.put_nowait(error)
    with pytest.raises(type(error), match=str(error)):
        await checkpointing.save_last(2, run_state={})
    assert heard == []


async def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    trainer, checkpointing, heard, said
):
    trainer.answers.put_nowait(Saved(version=1, complaint="It is locked."))
    await checkpointing.save_last(1, run_state={})
    assert (heard, said) == ([1], ["It is locked."])
