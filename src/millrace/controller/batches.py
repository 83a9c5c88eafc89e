"""What each step learns from: groups out of the buffer and of replay, packed.

Promise: a batch is `groups_per_step` groups, each within its staleness limit at the version it is
asked for. What a step learns from is in the journal before anybody sees the batch, and a step that
is there is made of the same groups in the same order, however often it is done.
Runs on the controller's event loop; packing runs in a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from millrace.config import RunConfig
from millrace.controller.buffer import Buffer
from millrace.controller.replay import build_replay, spread
from millrace.core.microbatch import Batch
from millrace.core.records import Group
from millrace.journal import Journal, NoJournal
from millrace.journal.ledger import LedgerStep
from millrace.training.packing.packer import pack_minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What one step learns from."""

    groups: list[Group]
    replayed: frozenset[int]  # numbers of those among them that were trained before
    batches: tuple[Batch, ...]

    @property
    def fresh(self) -> list[Group]:
        return [group for group in self.groups if group.number not in self.replayed]


class Batches:
    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: Buffer,
        journal: Journal | NoJournal,
        in_batch: Callable[[Sequence[Group]], list[Group]],
        on_replay: Callable[[int], None],
        pairs: bool,
        in_order: bool,
    ) -> None:
        """`in_batch` gives groups of one step the advantages they have among each other;
        `on_replay` is told how many of a batch need not be played. `pairs`: pack best and worst of
        a group together. `in_order`: by number, not as they came."""
        self._config = config
        self._buffer = buffer
        self._journal = journal
        self._in_batch = in_batch
        self._on_replay = on_replay
        self._pairs = pairs
        self._in_order = in_order
        self._replay = build_replay(
            config.buffer.replay,
            groups_per_step=config.trainer.groups_per_step,
            limit=config.buffer.limit,
            seed=config.seed,
        )

    async def next(self, version: int) -> Taken:
        """The batch for the step after `version`, once there are enough groups."""
        step = self._journal.ledger.steps.get(version + 1)
        if step is not None:
            return await self._same(step)
        replayed = [] if self._replay is None else self._replay.draw(version)
        self._on_replay(len(replayed))
        num_fresh = self._config.trainer.groups_per_step - len(replayed)
        fresh = await self._buffer.take(num_fresh, version=version)
        if self._in_order:
            fresh.sort(key=lambda group: group.number)
        await self._journal.begin_step(
            version + 1, fresh=_numbers(fresh), replayed=_numbers(replayed)
        )
        return await asyncio.to_thread(self._pack, fresh, replayed)

    async def redo(
        self, *, after: int, through: int
    ) -> AsyncIterator[tuple[int, tuple[Batch, ...]]]:
        """The versions after one, and the batches of the steps that made them, for a trainer that
        has lost them. Changes nothing here."""
        for version in range(after + 1, through + 1):
            taken = await self._again(self._journal.ledger.steps[version])
            yield version, taken.batches

    def applied(self, taken: Taken, *, version: int, was_skipped: bool) -> None:
        """The trainer has reached `version` by it. If all of its updates were applied, what is new
        of it may be trained once more."""
        self._journal.finish_step(version, was_skipped=was_skipped)
        if self._replay is not None and not was_skipped:
            self._replay.keep(taken.fresh)

    @property
    def may_return(self) -> Collection[int]:
        """Numbers of trained groups that may be trained once more."""
        return () if self._replay is None else self._replay.numbers

    async def restore(self, version: int) -> None:
        """What may be trained once more after the step that made `version`, as the journal has
        it."""
        if self._replay is None:
            return
        steps = [step for v, step in self._journal.ledger.steps.items() if v <= version]
        gone = {number for step in steps for number in step.replayed}
        for step in steps:
            if not step.was_skipped:
                left = [number for number in step.fresh if number not in gone]
                self._replay.keep(await self._journal.read_groups(left))

    async def _same(self, step: LedgerStep) -> Taken:
        """A batch that was taken before a crash."""
        if self._replay is not None:
            self._replay.forget(step.replayed)
        self._on_replay(len(step.replayed))
        return await self._again(step)

    async def _again(self, step: LedgerStep) -> Taken:
        fresh = await self._journal.read_groups(step.fresh)
        replayed = await self._journal.read_groups(step.replayed)
        return await asyncio.to_thread(self._pack, fresh, replayed)

    def _pack(self, fresh: list[Group], replayed: list[Group]) -> Taken:
        groups = self._in_batch(spread(fresh, replayed))
        batches = pack_minibatches(
            groups,
            num_minibatches=self._config.trainer.minibatches,
            microbatch_tokens=self._config.trainer.microbatch_tokens,
            pairs=self._pairs,
            critic=self._config.critic is not None,
        )
        numbers = frozenset(group.number for group in replayed)
        return Taken(groups=groups, replayed=numbers, batches=batches)


def _numbers(groups: Sequence[Group]) -> list[int]:
    return [group.number for group in groups]
