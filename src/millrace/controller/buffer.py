"""Bounded buffers of groups: the one between scoring and training, and the replay buffer.

Promise: take() never returns a group that the staleness limit rules out, and hands out each group
once, as `order` chooses. The limit is checked at take(), because versions advance while groups
wait. A group that it rules out is passed to `on_drop` and makes room for another.

Promise with `enforce = "wait"` (StalenessLimit.waits): a batch is not taken while that would leave
more old groups behind than the next batches can train within the limit. Then take() chooses the
oldest groups and waits for running ones, for each at most as long as it has run: another attempt at
it would take as long.

Promise of an in-order buffer: a batch holds no group while one with a lower number is still on its
way. A group that precedes a waiting one enters even a full buffer, or both would wait forever.

Promise of the replay buffer: a batch holds at most `per_batch` groups that were trained before,
none that the replay staleness limit rules out, and each is handed out once. For given contents, a
draw depends on the seed and the version only. A resumed run restores the contents from its journal.

Called from the controller's event loop only. Bounds: `capacity` groups each. admit() waits while
the buffer is full; in the replay buffer the oldest group makes room.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import numpy as np

from millrace.controller.orders import Oldest
from millrace.core.errors import RunFailed
from millrace.core.protocols import GroupOrder
from millrace.core.records import Group
from millrace.core.staleness import BufferedGroup, PolicyVersions, StalenessLimit, TokenVersions


class RunningGroup(NamedTuple):
    """A group that has not reached the buffer yet."""

    number: int
    oldest: int  # no version older than this one sampled its tokens
    age_s: float


@dataclass(kw_only=True, eq=False)
class Buffer:
    capacity: int
    limit: StalenessLimit
    order: GroupOrder
    on_drop: Callable[[BufferedGroup], None]
    versions: PolicyVersions = field(default_factory=PolicyVersions)
    # In an in-order buffer: whether a group with a lower number is still on its way.
    is_preceded: Callable[[int], bool] | None = None
    running: Callable[[], Iterable[RunningGroup]] | None = None  # to wait for, if limit.waits
    steps: int | None = None  # of the run; nothing is waited for that no step is left for
    now: Callable[[], float] = time.monotonic
    wait_s: float = 0.0  # mean time in the buffer of the groups taken last
    # In order of admission.
    _waiting: list[BufferedGroup] = field(default_factory=list[BufferedGroup])
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    # Running groups that take() waits for, or has waited for, and until when.
    _awaited: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def depth(self) -> int:
        return len(self._waiting)

    async def admit(self, group: Group) -> None:
        """Add a scored group; waits while the buffer is full."""
        tokens = TokenVersions.of_group(group)
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room_for(group.number))
            now_s = self.now()
            admitted = BufferedGroup(group=group, token_versions=tokens, admitted_s=now_s)
            self._waiting.append(admitted)
            self._changed.notify_all()

    async def take(self, n: int, *, version: int) -> list[Group]:
        """Wait for n groups that may be trained at `version`; `order` chooses them."""
        assert 0 < n <= self.capacity
        async with self._changed:
            self._awaited = {}
            while True:
                self._drop_stale(version)
                timeout_s = None
                if len(self._waiting) >= n and not self._awaits_others(n):
                    chosen, timeout_s = self._choose_in_time(n, version=version)
                    if timeout_s <= 0:
                        break
                    self._changed.notify_all()  # an awaited group may enter a full buffer
                # Not wait_for(): in Python 3.11, it may swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait()
            taken = [self._waiting[index] for index in chosen]
            rest = set(range(len(self._waiting))) - set(chosen)
            self._waiting = [self._waiting[index] for index in sorted(rest)]
            self._changed.notify_all()
        now_s = self.now()
        self.wait_s = sum(now_s - waiting.admitted_s for waiting in taken) / n
        return [waiting.group for waiting in taken]

    async def recheck(self) -> None:
        """A group that was on its way has ended."""
        if self.is_preceded is not None or self.running is not None:
            async with self._changed:
                self._changed.notify_all()

    def _has_room_for(self, number: int) -> bool:
        if len(self._waiting) < self.capacity or number in self._awaited:
            return True
        precedes = any(number < waiting.group.number for waiting in self._waiting)
        return self.is_preceded is not None and precedes

    def _awaits_others(self, n: int) -> bool:
        """True if a group that is on its way comes before the last of the next n."""
        if self.is_preceded is None:
            return False
        return self.is_preceded(sorted(waiting.group.number for waiting in self._waiting)[n - 1])

    def _choose_in_time(self, n: int, *, version: int) -> tuple[list[int], float]:
        chosen = self._choose(n, version=version)
        if self.running is None or not (late := self._late(chosen, version)):
            return chosen, 0.0
        if not isinstance(self.order, Oldest):
            chosen = list(Oldest().choose(self._waiting, n, version=version))
            late = self._late(chosen, version)
        now_s = self.now()
        until = [
            self._awaited.setdefault(group.number, now_s + group.age_s)
            for group in late
            if group is not None
        ]
        return chosen, max(until, default=now_s) - now_s

    def _late(self, chosen: Collection[int], version: int) -> list[RunningGroup | None]:
        """Groups left for later batches, oldest first, up to the last that would then be too stale.
        None stands for a group already in the buffer."""
        assert self.running is not None
        num_left = None if self.steps is None else (self.steps - version - 1) * len(chosen)
        rest: list[tuple[int, RunningGroup | None]] = [
            (one.token_versions.oldest, None)
            for index, one in enumerate(self._waiting)
            if index not in chosen and one.token_versions.oldest is not None
        ]
        rest += [(group.oldest, group) for group in self.running()]
        rest.sort(key=lambda pair: pair[0])
        too_late = [
            index
            for index, (oldest, _) in enumerate(rest[:num_left])
            if oldest < self.limit.oldest_at(version + 1 + index // len(chosen))
        ]
        return [group for _, group in rest[: too_late[-1] + 1]] if too_late else []

    def _choose(self, n: int, *, version: int) -> list[int]:
        chosen = list(self.order.choose(self._waiting, n, version=version))
        known = range(len(self._waiting))
        if len(chosen) != n or len(set(chosen)) != n or any(index not in known for index in chosen):
            name = type(self.order).__name__
            raise RunFailed(
                f"buffer.order: {name}.choose returned {chosen} when asked for {n} of"
                f" {len(known)} waiting groups; return {n} different indices into `waiting`."
            )
        return chosen

    def _drop_stale(self, version: int) -> None:
        before, self._waiting = self._waiting, []
        for waiting in (self.versions.realigned(one, version) for one in before):
            if self.limit.allows(waiting.token_versions, version=version):
                self._waiting.append(waiting)
            else:
                self.on_drop(waiting)
                self._changed.notify_all()


@dataclass(kw_only=True, eq=False)
class ReplayBuffer:
    per_batch: int
    capacity: InitVar[int]
    limit: StalenessLimit
    seed: int
    versions: PolicyVersions = field(default_factory=PolicyVersions)

    def __post_init__(self, capacity: int) -> None:
        self._trained: deque[BufferedGroup] = deque(maxlen=capacity)

    def keep(self, groups: Iterable[Group]) -> None:
        """Add groups that were trained for the first time."""
        self._trained.extend(
            BufferedGroup(group=g, token_versions=TokenVersions.of_group(g)) for g in groups
        )

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
        trained = [self.versions.realigned(one, version) for one in self._trained]
        fit = [one for one in trained if self.limit.allows(one.token_versions, version=version)]
        rng = np.random.default_rng([self.seed & 0xFFFFFFFF, version])
        drawn = set(rng.permutation(len(fit))[: self.per_batch].tolist())
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
