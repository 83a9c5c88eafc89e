"""The trainer as the controller sees it: a group of rank processes. Torch-free.

Promise: while the group is being replaced, callers wait and the new group answers them. The ranks
are one failure domain: a rank that dies leaves the others waiting in a collective, so the whole
group is lost with it. A weight update belongs to the group that published it and is lost with it.

All ranks get the same calls, and each gets its own share of every batch. Ranks reduce gradients,
decisions and metrics among themselves, so their replies agree and the group returns that of rank 0.
Rank 0 also publishes the weights, which it gathers from the others.

If the group dies, its replacement repeats the steps since a checkpoint, from memory or the journal.
A rank that runs out of memory leaves the others in the middle of a pass: the group dies of it, and
the next one splits large microbatches. Runs on the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.cluster import messages
from millrace.cluster.supervision.replica import DEATH_NOTICE_S
from millrace.cluster.worker import Worker
from millrace.core.errors import (
    CheckpointError,
    MillraceError,
    OutOfMemory,
    RankUnreachable,
    RunFailed,
    WorkerError,
)
from millrace.core.microbatch import Batch, MeshSizes
from millrace.core.records import DEFAULT_POLICY, WeightUpdate

MAX_BYTES = 2**31
Batches = tuple[Batch, ...]


@dataclass(eq=False)
class StepsOnRecord:
    """Steps that the journal has recorded; the interface is that of StepsInMemory."""

    redo: Callable[..., AsyncIterator[tuple[int, Batches]]]  # `after` a version `through` another
    _: KW_ONLY
    version: int  # of the trainer

    def record(self, version: int, batches: Batches) -> None:
        self.version = version

    def saved(self, version: int) -> None:
        """Nothing to do: the journal is pruned elsewhere."""

    def after(self, version: int) -> AsyncIterator[tuple[int, Batches]]:
        return self.redo(after=version, through=self.version)


@dataclass(kw_only=True, eq=False)
class StepsInMemory:
    """Steps since the last but one checkpoint, because the last may be unfinished or damaged.
    Bound: max_bytes of batches; the oldest are dropped first."""

    version: int  # of the trainer
    max_bytes: int = MAX_BYTES
    _steps: dict[int, Batches] = field(default_factory=dict[int, Batches])  # oldest first
    _num_bytes: int = 0

    def __post_init__(self) -> None:
        self._saved = self.version  # of the newest checkpoint

    def record(self, version: int, batches: Batches) -> None:
        self.version = version
        self._steps[version] = batches
        self._num_bytes += _size(batches)
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._steps)))

    def saved(self, version: int) -> None:
        """Record that a checkpoint of this version was written."""
        for earlier in [v for v in self._steps if v <= self._saved]:
            self._drop(earlier)
        self._saved = version

    async def after(self, version: int) -> AsyncIterator[tuple[int, Batches]]:
        for following in range(version + 1, self.version + 1):
            if following not in self._steps:
                raise RunFailed(
                    f"The trainer cannot be replaced: its last checkpoint is of step {version}, and"
                    f" step {following} is no longer in memory; resume the run with --resume, and"
                    " lower checkpoint.every_steps."
                )
            yield following, self._steps[following]

    def _drop(self, version: int) -> None:
        self._num_bytes -= _size(self._steps.pop(version))


def _size(value: object) -> int:
    """Bytes of all arrays in a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(_size(part) for part in value)
    if is_dataclass(value):
        return sum(_size(getattr(value, field.name)) for field in fields(value))
    return 0


@dataclass(eq=False)
class TrainerGroup:
    ranks: Sequence[Worker]  # empty while the group is being replaced
    _: KW_ONLY
    past: StepsInMemory | StepsOnRecord
    sizes: MeshSizes = field(default_factory=MeshSizes)
    step_timeout_s: float | None = None
    save_timeout_s: float | None = None
    publishes: bool = True  # False: no engine wants the weights of a step
    num_redone: int = 0  # steps that were repeated after a death
    _max_rows: int | None = None  # of a microbatch; lowered when a rank runs out of memory
    _replaced: asyncio.Event = field(default_factory=asyncio.Event)
    # Published by the present group.
    _unreleased: list[WeightUpdate] = field(default_factory=list[WeightUpdate])
    _returning: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def step(self, batch: Batch, *more: Batch, version: int) -> messages.Stepped:
        """Update on each batch; the weights become `version`, published in the background."""
        step = messages.TrainStep(batch=batch, version=version, more=more, publish=self.publishes)
        reply = await self._call(step, timeout_s=self.step_timeout_s)
        assert isinstance(reply, messages.Stepped)
        assert reply.version == version
        self.past.record(version, (batch, *more))
        return reply

    async def held_out_loss(self, batch: Batch, *, version: int) -> float:
        """Mean cross-entropy of the trained tokens; `version` is that of the weights."""
        step = messages.TrainStep(batch=batch, version=version, publish=False, updates=False)
        reply = await self._call(step, timeout_s=self.step_timeout_s)
        assert isinstance(reply, messages.Stepped)
        return reply.metrics["loss"]

    async def save(
        self,
        directory: Path,
        *,
        run_state: dict[str, Any],
        is_last: bool,
        on_copied: Callable[[], None],
        policy: str = DEFAULT_POLICY,
    ) -> messages.Saved:
        """Write a checkpoint and return when it is on the disk. Steps may continue after
        `on_copied`, unless this is the last checkpoint. If the group dies before `on_copied`, or
        during the last checkpoint, the next group writes it; otherwise that group may be at another
        version, and a CheckpointError is raised."""
        num_copied = 0

        def count_copy(_: messages.Part) -> None:
            nonlocal num_copied
            num_copied += 1
            if num_copied == len(self.ranks):
                on_copied()

        def check_retry(num_ranks: int) -> None:
            nonlocal num_copied
            if num_copied == num_ranks and not is_last:
                raise CheckpointError(f"The trainer died before {str(directory)!r} was written.")
            num_copied = 0

        reply = await self._call(
            messages.SaveCheckpoint(directory=str(directory), run_state=run_state, policy=policy),
            timeout_s=self.save_timeout_s,
            on_part=count_copy,
            on_death=check_retry,
        )
        assert isinstance(reply, messages.Saved)
        if policy == DEFAULT_POLICY:  # of the others, a group loads those of the same step
            self.past.saved(reply.version)
        return reply

    def published(self, update: WeightUpdate) -> None:
        if self.ranks:  # else it comes from a rank that is being killed
            self._unreleased.append(update)

    async def borrow(self, policy: str = DEFAULT_POLICY) -> WeightUpdate:
        """The newest version, which stays readable until it is released."""
        lending = asyncio.create_task(self._borrow(policy))
        try:
            return await asyncio.shield(lending)
        except asyncio.CancelledError:  # the trainer lends it nevertheless
            returning = asyncio.create_task(self._give_back(lending))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)
            raise

    async def _borrow(self, policy: str) -> WeightUpdate:
        reply = await self._call(
            messages.BorrowWeights(policy=policy), timeout_s=self.step_timeout_s
        )
        assert isinstance(reply, messages.Published)
        self._unreleased.append(reply.update)
        return reply.update

    async def _give_back(self, lending: asyncio.Task[WeightUpdate]) -> None:
        with contextlib.suppress(MillraceError):  # then nothing was lent
            await self.release(await lending)

    async def release(self, update: WeightUpdate) -> None:
        """Allow the trainer to reuse the bytes of an update that no engine reads any more."""
        if not self._has_published(update):
            return  # its group is gone
        self._unreleased = [other for other in self._unreleased if other is not update]
        ranks = self.ranks
        try:
            message = messages.Release(version=update.version, policy=update.policy)
            await ranks[0].call(message)
        except WorkerError:
            if not await _has_died(ranks):
                raise

    async def is_lost(self, update: WeightUpdate) -> bool:
        """Whether the group that published this update is dead."""
        return not self._has_published(update) or await _has_died(self.ranks)

    def lose(self) -> None:
        """Give up the group after the death of a rank; calls wait for the next group."""
        for rank in self.ranks:
            if not rank.dead.done():
                rank.kill()  # it would wait for the dead rank forever
        self.ranks = ()
        self._unreleased.clear()

    async def replace(
        self, ranks: Sequence[Worker], *, version: int, policies: Sequence[str] = ()
    ) -> list[WeightUpdate]:
        """Let new ranks, which have loaded `version`, repeat the steps since then and take over.
        These steps are not published, because engines may already hold their weights. Returns the
        newest version, as borrow() does, and those of further `policies`."""
        timeout_s = self.step_timeout_s
        async for following, (batch, *more) in self.past.after(version):
            step = messages.TrainStep(
                batch=batch, version=following, more=tuple(more), publish=False
            )
            await self._call_ranks(ranks, step, timeout_s=timeout_s)
            self.num_redone += 1
        updates: list[WeightUpdate] = []
        for policy in (DEFAULT_POLICY, *policies):
            borrow = messages.BorrowWeights(policy=policy)
            reply = await self._call_ranks(ranks, borrow, timeout_s=timeout_s)
            assert isinstance(reply, messages.Published)
            updates.append(reply.update)
        self._unreleased += updates
        self.ranks = ranks
        self._replaced.set()
        return updates

    def _has_published(self, update: WeightUpdate) -> bool:
        return bool(self.ranks) and any(update is other for other in self._unreleased)

    async def _call(
        self,
        message: messages.Message,
        *,
        timeout_s: float | None,
        on_part: Callable[[messages.Part], None] | None = None,
        on_death: Callable[[int], None] = lambda num_ranks: None,
    ) -> messages.Message:
        """Call the group, and the next one if this one dies. `on_death` gets the number of ranks
        and may raise to prevent the retry."""
        while True:
            while not (ranks := self.ranks):
                self._replaced.clear()
                await self._replaced.wait()
            try:
                return await self._call_ranks(ranks, message, timeout_s=timeout_s, on_part=on_part)
            except WorkerError:
                if not await _has_died(ranks):
                    raise
                if self.ranks is ranks:
                    self.lose()
                on_death(len(ranks))

    async def _call_ranks(
        self,
        ranks: Sequence[Worker],
        message: messages.Message,
        *,
        timeout_s: float | None,
        on_part: Callable[[messages.Part], None] | None = None,
    ) -> messages.Message:
        """The reply of rank 0, once all ranks have replied; the first error is raised at once."""
        if isinstance(message, messages.TrainStep):
            message = msgspec.structs.replace(message, max_rows=self._max_rows)

        async def call(rank: int, worker: Worker) -> messages.Message:
            try:
                return await worker.call(
                    _share_of(message, data_rank=self.sizes.data_rank(rank)),
                    timeout_s=timeout_s,
                    kill_on_timeout=True,
                    expect_progress=True,
                    on_part=on_part,
                )
            except OutOfMemory as error:
                assert isinstance(message, messages.TrainStep)
                self._max_rows = _most_rows(message, failed=error.num_tokens) // 2
                worker.fail(_shortage(error, max_rows=self._max_rows), error=error)
                raise worker.dead.result() from error
            except RankUnreachable as error:  # maybe long before the other's death is known
                worker.fail(str(error), error=error)
                raise worker.dead.result() from error

        first, *others = await asyncio.gather(*map(call, range(len(ranks)), ranks))
        if not isinstance(message, messages.BorrowWeights):  # which the other ranks only confirm
            kinds = {type(reply) for reply in (first, *others)}
            assert len(kinds) == 1, "ranks take the same decisions"
        return first


def _share_of(message: messages.Message, *, data_rank: int) -> messages.Message:
    if not isinstance(message, messages.TrainStep) or message.batch.num_ranks == 1:
        return message
    return msgspec.structs.replace(
        message,
        batch=message.batch.of_rank(data_rank),
        more=tuple(batch.of_rank(data_rank) for batch in message.more),
    )


def _most_rows(step: messages.TrainStep, *, failed: int | None) -> int:
    """Rows of the microbatch that failed, or else of the largest, as far as it can be split."""
    rows = [len(part.tokens) for batch in (step.batch, *step.more) for part in batch.microbatches]
    return min(failed or max(rows), step.max_rows or max(rows))


def _shortage(error: OutOfMemory, *, max_rows: int) -> str:
    return (
        f"ran out of memory: {str(error).rstrip('.')}, so those of more than {max_rows} tokens are"
        " split from now on; to avoid this restart, lower trainer.microbatch_tokens, set"
        " trainer.gradient_checkpointing to true, or raise trainer.mesh.cp"
    )


async def _has_died(ranks: Sequence[Worker]) -> bool:
    """Whether a rank is dead or is reported dead within DEATH_NOTICE_S."""
    deaths = {rank.dead for rank in ranks}
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(deaths, timeout=DEATH_NOTICE_S, return_when=first)
    return bool(done)
