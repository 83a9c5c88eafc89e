"""The orders in which the buffer hands out groups: one Sampler each.

    [buffer]
    order = "freshest"                     # or {type = "difficulty", solved_at = 0.5}

Promise: a typo, or an order that would never have enough groups, fails before any worker starts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin
from millrace.core.protocols import Sampler
from millrace.core.staleness import Waiting

SECTION = "buffer.order"
DEFAULT = "oldest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """First admitted, first trained."""

    def num_needed(self, n: int) -> int:
        return n

    def choose(self, waiting: Sequence[Waiting], n: int, *, version: int) -> Sequence[int]:
        return range(n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Oldest:
    """The group with the oldest token first, as it would be the next to be dropped."""

    def num_needed(self, n: int) -> int:
        return n

    def choose(self, waiting: Sequence[Waiting], n: int, *, version: int) -> Sequence[int]:
        return _first(waiting, n, key=lambda one: _oldest(one, version=version))


@dataclass(frozen=True, kw_only=True, slots=True)
class Freshest:
    """The group with the lowest mean staleness first; others may become too stale."""

    def num_needed(self, n: int) -> int:
        return 2 * n  # a single batch leaves no choice

    def choose(self, waiting: Sequence[Waiting], n: int, *, version: int) -> Sequence[int]:
        return _first(waiting, n, key=lambda one: _mean_staleness(one, version=version))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difficulty:
    """The group nearest to half solved first, as a policy learns most from it; then the oldest."""

    solved_at: float = 1.0
    """An episode counts as solved when its score reaches this."""

    def num_needed(self, n: int) -> int:
        return 2 * n

    def choose(self, waiting: Sequence[Waiting], n: int, *, version: int) -> Sequence[int]:
        return _first(
            waiting, n, key=lambda one: (self._distance(one), _oldest(one, version=version))
        )

    def _distance(self, one: Waiting) -> float:
        scores = one.group.scores
        return abs(sum(score.total >= self.solved_at for score in scores) / len(scores) - 0.5)


ORDERS: Mapping[str, type] = {
    "oldest": Oldest,
    "freshest": Freshest,
    "ready": Ready,
    "difficulty": Difficulty,
}


def build_sampler(table: Mapping[str, Any]) -> Sampler:
    return build_plugin(table, builtins=ORDERS, default=DEFAULT, section=SECTION)


def check_room(
    table: Mapping[str, Any], *, groups_per_step: int, capacity: int, max_staleness: int
) -> None:
    """Raises ConfigError if there can never be as many waiting groups as the order needs."""
    needed = build_sampler(table).num_needed(groups_per_step)
    order = f"buffer.order = {table.get('type', DEFAULT)!r} chooses among {needed} waiting groups"
    if needed > capacity:
        raise ConfigError(
            f"{order}, but buffer.capacity = {capacity}; raise it to {needed}, or set the order to"
            " 'oldest'."
        )
    # Of the max_staleness + 1 batches that admission allows, one is about to be trained when the
    # next is chosen, and one cannot start before the weights of the last step have arrived.
    if groups_per_step < needed > (max_staleness - 1) * groups_per_step:
        raise ConfigError(
            f"{order}, which would become staler than buffer.max_staleness = {max_staleness}; raise"
            f" it to {math.ceil(needed / groups_per_step) + 1}, or set the order to 'oldest'."
        )


def _first(waiting: Sequence[Waiting], n: int, *, key: Callable[[Waiting], Any]) -> Sequence[int]:
    """Indices of the lowest keys; among equal keys, the first admitted."""
    return sorted(range(len(waiting)), key=lambda index: key(waiting[index]))[:n]


def _oldest(one: Waiting, *, version: int) -> int:
    return version if one.stamps.oldest is None else one.stamps.oldest


def _mean_staleness(one: Waiting, *, version: int) -> float:
    return one.stamps.total_staleness(version) / max(one.stamps.num_tokens, 1)
