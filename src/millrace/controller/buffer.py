"""Bounded buffer between scoring and training.

Promise: take() never returns a group that the staleness limit rules out, and hands out each group
once, in the order of its sampler. The limit is checked at take(), because versions advance while
groups wait. A group that it rules out is passed to `on_drop` and makes room for another.

Called from the controller's event loop only. Bound: `capacity` groups; admit() waits while it is
full.
"""

import asyncio
from collections.abc import Callable

from millrace.core.clock import REAL_CLOCK, Clock
from millrace.core.errors import RunFailed
from millrace.core.protocols import Sampler
from millrace.core.records import Group
from millrace.core.staleness import StalenessLimit, Stamps, Waiting


class Buffer:
    def __init__(
        self,
        *,
        capacity: int,
        limit: StalenessLimit,
        sampler: Sampler,
        on_drop: Callable[[Waiting], None],
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self.capacity = capacity
        self.wait_s = 0.0  # mean time in the buffer of the groups taken last
        self._limit = limit
        self._sampler = sampler
        self._on_drop = on_drop
        self._clock = clock
        self._waiting: list[Waiting] = []  # in order of admission
        self._changed = asyncio.Condition()

    @property
    def depth(self) -> int:
        return len(self._waiting)

    async def admit(self, group: Group) -> None:
        """Add a scored group; waits while the buffer is full."""
        stamps = Stamps.of_group(group)
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self.capacity)
            now_s = self._clock.now()
            self._waiting.append(Waiting(group=group, stamps=stamps, admitted_s=now_s))
            self._changed.notify_all()

    async def take(self, n: int, *, version: int) -> list[Group]:
        """n groups that may be trained at `version`, chosen by the sampler; waits until there are
        so many."""
        assert 0 < n <= self.capacity
        async with self._changed:
            while True:
                self._drop_stale(version)
                if len(self._waiting) >= n:
                    break
                await self._changed.wait()
            chosen = self._choose(n, version=version)
            taken = [self._waiting[index] for index in chosen]
            rest = set(range(len(self._waiting))) - set(chosen)
            self._waiting = [self._waiting[index] for index in sorted(rest)]
            self._changed.notify_all()
        now_s = self._clock.now()
        self.wait_s = sum(now_s - waiting.admitted_s for waiting in taken) / n
        return [waiting.group for waiting in taken]

    def _choose(self, n: int, *, version: int) -> list[int]:
        chosen = list(self._sampler.choose(self._waiting, n, version=version))
        known = range(len(self._waiting))
        if len(chosen) != n or len(set(chosen)) != n or any(index not in known for index in chosen):
            name = type(self._sampler).__name__
            raise RunFailed(
                f"buffer.order: {name}.choose returned {chosen} when asked for {n} of"
                f" {len(known)} waiting groups; return {n} different indices into `waiting`."
            )
        return chosen

    def _drop_stale(self, version: int) -> None:
        fit: list[Waiting] = []
        stale: list[Waiting] = []
        for waiting in self._waiting:
            is_fit = self._limit.allows(waiting.stamps, version=version)
            (fit if is_fit else stale).append(waiting)
        if not stale:
            return
        self._waiting = fit
        for waiting in stale:
            self._on_drop(waiting)
        self._changed.notify_all()
