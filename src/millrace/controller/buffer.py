"""Bounded buffers of groups: the one between scoring and training, and the replay buffer.

Promise: take() never returns a group that the staleness limit rules out, and hands out each group
once, in the order of its sampler. The limit is checked at take(), because versions advance while
groups wait. A group that it rules out is passed to `on_drop` and makes room for another.

Promise of the replay buffer: a batch holds at most `per_batch` groups that were trained before,
none that the replay staleness limit rules out, and each is handed out once. For given contents, a
draw depends on the seed and the version only. A resumed run restores the contents from its journal.

Called from the controller's event loop only. Bounds: `capacity` groups each. admit() waits while
the buffer is full; in the replay buffer the oldest group makes room.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.core.errors import RunFailed
from millrace.core.protocols import Sampler
from millrace.core.records import Group
from millrace.core.staleness import StalenessLimit, Stamps, Waiting


@dataclass(kw_only=True, eq=False)
class Buffer:
    capacity: int
    limit: StalenessLimit
    sampler: Sampler
    on_drop: Callable[[Waiting], None]
    now: Callable[[], float] = time.monotonic
    wait_s: float = 0.0  # mean time in the buffer of the groups taken last
    _waiting: list[Waiting] = field(default_factory=list[Waiting])  # in order of admission
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def depth(self) -> int:
        return len(self._waiting)

    async def admit(self, group: Group) -> None:
        """Add a scored group; waits while the buffer is full."""
        stamps = Stamps.of_group(group)
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self.capacity)
            now_s = self.now()
            self._waiting.append(Waiting(group=group, stamps=stamps, admitted_s=now_s))
            self._changed.notify_all()

    async def take(self, n: int, *, version: int) -> list[Group]:
        """Wait for n groups that may be trained at `version`; the sampler chooses them."""
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
        now_s = self.now()
        self.wait_s = sum(now_s - waiting.admitted_s for waiting in taken) / n
        return [waiting.group for waiting in taken]

    def _choose(self, n: int, *, version: int) -> list[int]:
        chosen = list(self.sampler.choose(self._waiting, n, version=version))
        known = range(len(self._waiting))
        if len(chosen) != n or len(set(chosen)) != n or any(index not in known for index in chosen):
            name = type(self.sampler).__name__
            raise RunFailed(
                f"buffer.order: {name}.choose returned {chosen} when asked for {n} of"
                f" {len(known)} waiting groups; return {n} different indices into `waiting`."
            )
        return chosen

    def _drop_stale(self, version: int) -> None:
        before, self._waiting = self._waiting, []
        for waiting in before:
            if self.limit.allows(waiting.stamps, version=version):
                self._waiting.append(waiting)
            else:
                self.on_drop(waiting)
                self._changed.notify_all()


class ReplayBuffer:
    def __init__(self, *, per_batch: int, capacity: int, limit: StalenessLimit, seed: int) -> None:
        self._per_batch = per_batch
        self._limit = limit
        self._seed = seed
        self._trained: deque[Waiting] = deque(maxlen=capacity)

    def keep(self, groups: Iterable[Group]) -> None:
        """Add groups that were trained for the first time."""
        self._trained.extend(Waiting(group=g, stamps=Stamps.of_group(g)) for g in groups)

    @property
    def numbers(self) -> list[int]:
        return [one.group.number for one in self._trained]

    def forget(self, numbers: Collection[int]) -> None:
        """Remove groups that were handed out before a crash."""
        rest = [one for one in self._trained if one.group.number not in numbers]
        self._trained.clear()
        self._trained.extend(rest)

    def draw(self, version: int) -> list[Group]:
        """Remove and return up to `per_batch` groups; also removes those that became too stale."""
        fit = [one for one in self._trained if self._limit.allows(one.stamps, version=version)]
        rng = np.random.default_rng([self._seed & 0xFFFFFFFF, version])
        drawn = set(rng.permutation(len(fit))[: self._per_batch].tolist())
        self._trained.clear()
        self._trained.extend(one for index, one in enumerate(fit) if index not in drawn)
        return [fit[index].group for index in sorted(drawn)]


def interleave(fresh: Sequence[Group], replayed: Sequence[Group]) -> list[Group]:
    """One batch in which replayed groups are spread evenly, so each minibatch has its share."""
    placed = [
        ((index + 0.5) / len(groups), group)
        for groups in (fresh, replayed)
        for index, group in enumerate(groups)
    ]
    return [group for _, group in sorted(placed, key=lambda one: one[0])]
