import asyncio
import dataclasses

import numpy as np
import pytest
from batches import batch_of, mixed_rollouts

from millrace.cluster.messages import (
    BorrowWeights,
    Copied,
    Done,
    Published,
    Release,
    SaveCheckpoint,
    Saved,
    Stepped,
    TrainStep,
)
from millrace.core.errors import CheckpointError, OutOfMemory, RankUnreachable, WorkerError
from millrace.core.microbatch import MeshSizes
from millrace.core.records import WeightUpdate
from millrace.training.group import StepsInMemory, TrainerGroup

BATCH = batch_of(mixed_rollouts(np.random.default_rng(0)))


def make_update(version):
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )


class FakeWorker:
    """A rank that answers calls, or fails, dies or hangs at a given kind of message."""

    name = "trainer"

    def __init__(
        self, *, version=0, rank=0, dies_at=None, fails_at=None, hangs_at=None, copies=False
    ) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self.version = version
        self.rank = rank
        self.dies_at, self.fails_at, self.hangs_at = dies_at, fails_at, hangs_at
        self.copies = copies  # say Copied before anything else happens
        self.error = None  # that it fails with, if not a WorkerError
        self.calls = []

    async def call(self, message, *, on_part=None, **settings):
        self.calls.append(message)
        if self.copies:
            assert on_part is not None
            on_part(Copied())
        error = WorkerError("It failed.", worker=self.name)
        if isinstance(message, self.fails_at or ()):
            raise self.error or error
        if isinstance(message, self.dies_at or ()):
            asyncio.get_running_loop().call_soon(self.dead.set_result, error)
            raise error
        if isinstance(message, self.hangs_at or ()):
            raise await self.dead
        match message:
            case TrainStep():
                assert message.version == self.version + 1
                self.version += 1
                return Stepped(version=message.version, metrics={})
            case BorrowWeights() if self.rank == 0:
                return Published(update=make_update(self.version))
            case SaveCheckpoint():
                return Saved(version=self.version)
            case _:
                return Done()

    def kill(self):
        self.dead.set_result(WorkerError("It was killed.", worker=self.name))

    def fail(self, reason, *, error):
        self.dead.set_result(WorkerError(f"It {reason}.", worker=self.name))

    @property
    def steps(self):
        return [(m.version, m.publish) for m in self.calls if isinstance(m, TrainStep)]


def make_group(*ranks, version=0, sizes=None) -> TrainerGroup:
    sizes = sizes or MeshSizes(dp_shard=len(ranks))
    return TrainerGroup(ranks, past=StepsInMemory(version=version), sizes=sizes)  # pyright: ignore


def save(group, directory, *, is_last, on_copied=lambda: None):
    return group.save(directory, run_state={}, is_last=is_last, on_copied=on_copied)


async def run_pending_tasks():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_step_in_flight_runs_once_on_the_new_group_after_the_steps_since_its_checkpoint():
    first = FakeWorker()
    group = make_group(first)
    for version in (1, 2):
        await group.step(BATCH, version=version)
    first.dies_at = TrainStep
    stepping = asyncio.create_task(group.step(BATCH, BATCH, version=3))
    await run_pending_tasks()
    assert not stepping.done()
    second = FakeWorker(version=1)
    (newest,) = await group.replace([second], version=1)  # pyright: ignore
    assert newest.version == 2
    assert (await stepping).version == 3
    assert second.steps == [(2, False), (3, True)]
    assert group.num_redone == 1


async def test_group_after_one_that_ran_out_of_memory_splits_microbatches():
    rows = max(len(part.tokens) for part in BATCH.microbatches)
    ranks = [FakeWorker(hangs_at=TrainStep), FakeWorker(rank=1, fails_at=TrainStep)]
    group = make_group(*ranks)
    stepping = asyncio.create_task(group.step(BATCH, version=1))
    failing = rows - 2
    for size, limit in ((f"of {failing} tokens", failing // 2), ("of any size", failing // 2 // 2)):
        ranks[1].error = OutOfMemory(f"A microbatch {size} does not fit.")
        await run_pending_tasks()
        assert all(rank.dead.done() for rank in ranks)
        assert f"those of more than {limit} tokens are split" in str(ranks[1].dead.result())
        ranks = [FakeWorker(hangs_at=TrainStep), FakeWorker(rank=1, fails_at=TrainStep)]
        await group.replace(ranks, version=0)  # pyright: ignore
    for rank in ranks:
        rank.hangs_at = rank.fails_at = None
    assert (await stepping).version == 1
    assert [rank.calls[-1].max_rows for rank in ranks] == [limit, limit]


async def test_group_whose_rank_lost_another_is_replaced_before_the_death_of_that_one_is_known():
    ranks = [FakeWorker(fails_at=TrainStep), FakeWorker(rank=1, hangs_at=TrainStep)]
    ranks[0].error = RankUnreachable("lost its connection to another rank")
    group = make_group(*ranks)
    stepping = asyncio.create_task(group.step(BATCH, version=1))
    await run_pending_tasks()
    assert all(rank.dead.done() for rank in ranks)
    assert "lost its connection" in str(ranks[0].dead.result())
    await group.replace([FakeWorker(), FakeWorker(rank=1)], version=0)  # pyright: ignore
    assert (await stepping).version == 1


async def test_error_of_a_living_rank_is_raised():
    group = make_group(FakeWorker(fails_at=TrainStep))
    with pytest.raises(WorkerError, match="It failed"):
        await group.step(BATCH, version=1)


async def test_updates_of_a_dead_group_are_lost_and_never_released_to_the_next():
    first = FakeWorker()
    group = make_group(first)
    old = make_update(0)
    group.published(old)
    assert not await group.is_lost(old)
    first.dead.set_result(WorkerError("It died.", worker="trainer"))
    group.lose()
    await group.release(old)
    second = FakeWorker()
    (lent,) = await group.replace([second], version=0)  # pyright: ignore
    assert await group.is_lost(old)
    await group.release(old)
    assert not any(isinstance(message, Release) for message in second.calls)
    await group.release(lent)
    assert isinstance(second.calls[-1], Release)


async def test_update_that_a_killed_rank_still_announces_is_lost_with_its_group():
    group = make_group(FakeWorker(), FakeWorker(rank=1))
    group.lose()
    old = make_update(1)
    group.published(old)  # it was on its way
    second = [FakeWorker(), FakeWorker(rank=1)]
    await group.replace(second, version=0)  # pyright: ignore
    assert await group.is_lost(old)
    await group.release(old)
    assert not any(isinstance(message, Release) for message in second[0].calls)


class SlowLender(FakeWorker):
    """Answers BorrowWeights when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_lend = asyncio.Event()

    async def call(self, message, **settings):
        reply = await super().call(message, **settings)
        if isinstance(message, BorrowWeights):
            await self.may_lend.wait()
        return reply


async def test_loan_is_released_if_its_borrower_was_cancelled_before_it_came():
    rank = SlowLender()
    borrowing = asyncio.create_task(make_group(rank).borrow())
    await run_pending_tasks()
    borrowing.cancel()
    await run_pending_tasks()
    assert borrowing.cancelled()
    rank.may_lend.set()
    await run_pending_tasks()
    assert rank.calls == [BorrowWeights(), Release(version=0)]


@pytest.mark.parametrize(("is_copied", "is_last"), [(False, False), (True, True)])
async def test_checkpoint_is_retried_if_the_new_group_is_at_the_same_version(
    tmp_path, is_copied, is_last
):
    group = make_group(FakeWorker(dies_at=SaveCheckpoint, copies=is_copied))
    saving = asyncio.create_task(save(group, tmp_path, is_last=is_last))
    await run_pending_tasks()
    second = FakeWorker()
    await group.replace([second], version=0)  # pyright: ignore
    await saving
    assert isinstance(second.calls[-1], SaveCheckpoint)


async def test_checkpoint_is_lost_with_its_group_once_steps_may_have_continued(tmp_path):
    group = make_group(FakeWorker(dies_at=SaveCheckpoint, copies=True))
    saving = asyncio.create_task(save(group, tmp_path, is_last=False))
    await run_pending_tasks()
    second = FakeWorker()
    await group.replace([second], version=0)  # pyright: ignore
    with pytest.raises(CheckpointError, match="The trainer died before"):
        await saving
    assert not any(isinstance(message, SaveCheckpoint) for message in second.calls)


async def test_each_rank_steps_on_its_own_share_of_the_batch():
    ranks = [FakeWorker(), FakeWorker()]
    batch = dataclasses.replace(BATCH, microbatches=BATCH.microbatches * 4, num_ranks=2)
    reply = await make_group(*ranks).step(batch, batch, version=1)
    assert reply == Stepped(version=1, metrics={})
    for rank in ranks:
        (step,) = rank.calls
        for share in (step.batch, *step.more):
            assert (len(share.microbatches), share.num_ranks) == (2, 1)
            assert share.num_trained_tokens == batch.num_trained_tokens


async def test_ranks_that_compute_a_microbatch_together_get_the_same_share():
    ranks = [FakeWorker() for _ in range(4)]
    first, second = (dataclasses.replace(BATCH.microbatches[0]) for _ in range(2))
    batch = dataclasses.replace(BATCH, microbatches=(first, second), num_ranks=2)
    await make_group(*ranks, sizes=MeshSizes(dp_shard=2, tp=2)).step(batch, version=1)
    shares = [rank.calls[0].batch.microbatches for rank in ranks]
    assert shares == [(first,), (first,), (second,), (second,)]


async def test_death_of_one_rank_ends_the_others_and_the_step_runs_on_the_next_group():
    ranks = [FakeWorker(hangs_at=TrainStep), FakeWorker(dies_at=TrainStep)]
    group = make_group(*ranks)
    batch = dataclasses.replace(BATCH, microbatches=BATCH.microbatches * 2, num_ranks=2)
    stepping = asyncio.create_task(group.step(batch, version=1))
    await run_pending_tasks()
    assert all(rank.dead.done() for rank in ranks)
    replacements = [FakeWorker(), FakeWorker()]
    await group.replace(replacements, version=0)  # pyright: ignore
    assert (await stepping).version == 1
    assert [rank.steps for rank in replacements] == [[(1, True)], [(1, True)]]


async def test_all_ranks_take_part_in_a_loan_and_rank_0_releases_it():
    ranks = [FakeWorker(version=3), FakeWorker(version=3, rank=1)]
    group = make_group(*ranks)
    update = await group.borrow()
    assert update.version == 3
    await group.release(update)
    assert [rank.calls for rank in ranks] == [
        [BorrowWeights(), Release(version=3)],
        [BorrowWeights()],
    ]


async def test_steps_continue_when_all_ranks_have_copied_their_state(tmp_path):
    ranks = [FakeWorker(copies=True), FakeWorker(copies=True)]
    num_copied = []
    await save(make_group(*ranks), tmp_path, is_last=True, on_copied=lambda: num_copied.append(1))
    assert num_copied == [1]


async def test_checkpoints_of_further_policies_forget_no_steps(tmp_path):
    group = make_group(FakeWorker())
    for version in (1, 2):
        await group.step(BATCH, version=version)
    for policy in ("second", "third"):
        settings = {"run_state": {}, "is_last": True, "on_copied": lambda: None}
        await group.save(tmp_path / policy, **settings, policy=policy)
    second = FakeWorker()  # it starts from the checkpoint that the first policy has
    await group.replace([second], version=0)  # pyright: ignore
    assert second.steps == [(1, False), (2, False)]
