"""What each step learns from: groups out of the buffer and of replay, packed.

Promise: a batch is `groups_per_step` groups, each within its staleness limit at the version it is
asked for. Runs on the controller's event loop; packing runs in a thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.config import RunConfig
from millrace.core.microbatch import Batch
from millrace.core.records import Group
from millrace.staging.buffer import Buffer
from millrace.staging.packing import pack_minibatches
from millrace.staging.replay import build_replay, spread


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
        replayed = [] if self._replay is None else self._replay.draw(version)
        self._on_replay(len(replayed))
        num_fresh = self._config.trainer.groups_per_step - len(replayed)
        fresh = await self._buffer.take(num_fresh, version=version)
        if self._in_order:
            fresh.sort(key=lambda group: group.number)
        return await asyncio.to_thread(self._pack, fresh, replayed)

    def trained(self, taken: Taken) -> None:
        """All of its updates were applied: what is new of it may be trained once more."""
        if self._replay is not None:
            self._replay.keep(taken.fresh)

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
