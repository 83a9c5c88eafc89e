"""Bounded buffer between scoring and training.

Promise: take() never returns a group staler than the policy allows, and hands out each group once,
oldest first. The check runs at take(), because versions advance while groups wait.

Called from the controller's event loop only. Bound: `capacity` groups; admit() waits while it is
full.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from millrace.core.records import Group


class Buffer:
    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        on_drop: Callable[[Group], None],
    ) -> None:
        self._capacity = capacity
        self._max_staleness = max_staleness
        self._on_drop = on_drop  # told of each group that became too stale
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Condition()

    @property
    def depth(self) -> int:
        return len(self._groups)

    @property
    def capacity(self) -> int:
        return self._capacity

    async def admit(self, group: Group) -> None:
        """Add a scored group; waits while the buffer is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < self._capacity)
            self._groups.append(group)
            self._changed.notify_all()

    async def take(self, n: int, *, version: int) -> list[Group]:
        """The n oldest groups fit to be trained at `version`; waits until there are so many."""
        assert 0 < n <= self._capacity
        async with self._changed:
            while True:
                self._drop_stale(version)
                if len(self._groups) >= n:
                    break
                await self._changed.wait()
            taken = [self._groups.popleft() for _ in range(n)]
            self._changed.notify_all()
            return taken

    def _drop_stale(self, version: int) -> None:
        fit = deque(g for g in self._groups if version - g.oldest_version <= self._max_staleness)
        if len(fit) == len(self._groups):
            return
        stale = [g for g in self._groups if version - g.oldest_version > self._max_staleness]
        self._groups = fit
        for group in stale:
            self._on_drop(group)
        self._changed.notify_all()
