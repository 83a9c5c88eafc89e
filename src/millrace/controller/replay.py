"""Groups that were trained once and may be trained once more.

Promise: a batch holds at most `per_batch` of them, none that the replay staleness limit rules out,
and each is handed out once. For given contents, a draw depends on the seed and the version only. A
resumed run restores the contents from its journal.

Called from the controller's event loop only. Bound: `capacity` groups; the oldest makes room.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from millrace.config import ReplayConfig
from millrace.core.records import Group
from millrace.core.staleness import StalenessLimit, Stamps, Waiting


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
        """Up to `per_batch` groups for a batch of this version. Removes them, and the groups that
        have become too stale."""
        fit = [one for one in self._trained if self._limit.allows(one.stamps, version=version)]
        rng = np.random.default_rng([self._seed & 0xFFFFFFFF, version])
        drawn = set(rng.permutation(len(fit))[: self._per_batch].tolist())
        self._trained.clear()
        self._trained.extend(one for index, one in enumerate(fit) if index not in drawn)
        return [fit[index].group for index in sorted(drawn)]


def build_replay(
    settings: ReplayConfig | None, *, groups_per_step: int, limit: StalenessLimit, seed: int
) -> ReplayBuffer | None:
    """`limit`: for fresh groups; replayed ones differ in max_staleness only."""
    if settings is None:
        return None
    return ReplayBuffer(
        per_batch=settings.groups_of(groups_per_step),
        capacity=settings.capacity,
        limit=replace(limit, max_staleness=settings.max_staleness),
        seed=seed,
    )


def interleave(fresh: Sequence[Group], replayed: Sequence[Group]) -> list[Group]:
    """One batch in which replayed groups are spread evenly, so each minibatch has its share."""
    placed = [
        ((index + 0.5) / len(groups), group)
        for groups in (fresh, replayed)
        for index, group in enumerate(groups)
    ]
    return [group for _, group in sorted(placed, key=lambda one: one[0])]
