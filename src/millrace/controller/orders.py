"""The orders in which the buffer hands out groups: one GroupOrder each.

    [buffer]
    order = "freshest"                     # or {type = "difficulty", solved_at = 0.5}

Promise: a typo, or an order that would never have enough groups, fails before any worker starts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin
from millrace.core.protocols import GroupOrder
from millrace.core.staleness import BufferedGroup, StalenessLimit

SECTION = "buffer.order"
DEFAULT = "oldest"


class _ByKey:
    """Takes the groups with the lowest keys; among equal keys, the first admitted."""

    batches_needed: ClassVar[int] = 2  # a single batch leaves no choice

    def num_needed(self, n: int) -> int:
        return self.batches_needed * n

    def choose(self, waiting: Sequence[BufferedGroup], n: int, *, version: int) -> Sequence[int]:
        keys = [self.key(one, version=version) for one in waiting]
        return sorted(range(len(waiting)), key=lambda index: keys[index])[:n]

    def key(self, one: BufferedGroup, *, version: int) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Ready(_ByKey):
    """First admitted, first trained."""

    batches_needed: ClassVar[int] = 1

    def key(self, one: BufferedGroup, *, version: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class InOrder(_ByKey):
    """Takes groups in the order of their tasks. The buffer waits for earlier ones
    that still run."""

    batches_needed: ClassVar[int] = 1

    def key(self, one: BufferedGroup, *, version: int) -> int:
        return one.group.number


@dataclass(frozen=True, kw_only=True)
class Oldest(_ByKey):
    """The group with the oldest token first, as it would be the next to be dropped."""

    batches_needed: ClassVar[int] = 1

    def key(self, one: BufferedGroup, *, version: int) -> int:
        return version if one.token_versions.oldest is None else one.token_versions.oldest


@dataclass(frozen=True, kw_only=True)
class Freshest(_ByKey):
    """The group with the lowest mean staleness first; others may become too stale."""

    def key(self, one: BufferedGroup, *, version: int) -> float:
        return one.token_versions.total_staleness(version) / max(one.token_versions.num_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Difficulty(_ByKey):
    """The group nearest to half solved first, as a policy learns most from it; then the oldest."""

    solved_at: float = 1.0
    """An episode counts as solved when its score reaches this."""

    def key(self, one: BufferedGroup, *, version: int) -> tuple[float, int]:
        distance = abs(one.group.solve_rate(self.solved_at) - 0.5)
        return distance, Oldest().key(one, version=version)


ORDERS: Mapping[str, type] = {
    "oldest": Oldest,
    "freshest": Freshest,
    "ready": Ready,
    "in_order": InOrder,
    "difficulty": Difficulty,
}


def build_group_order(table: Mapping[str, Any], *, solved_at: float = 1.0) -> GroupOrder:
    """`solved_at`: that of [evaluate], unless the table has its own."""
    if table.get("type") == "difficulty":
        table = {"solved_at": solved_at, **table}
    return build_plugin(table, builtins=ORDERS, default=DEFAULT, section=SECTION)


def check_room(
    table: Mapping[str, Any], *, groups_per_step: int, capacity: int, limit: StalenessLimit
) -> None:
    """Raises ConfigError if there can never be as many waiting groups as the order needs."""
    needed = build_group_order(table).num_needed(groups_per_step)
    order = f"buffer.order = {table.get('type', DEFAULT)!r} chooses among {needed} waiting groups"
    if needed > capacity:
        raise ConfigError(
            f"{order}, but buffer.capacity = {capacity}; raise it to {needed}, or set the order to"
            " 'oldest'."
        )
    # Of the max_staleness + 1 batches that admission allows, one is about to be trained when the
    # next is chosen, and one cannot start before the weights of the last step have arrived.
    max_staleness = limit.max_staleness
    room = (max_staleness - 1) * groups_per_step
    if groups_per_step < needed > room and not limit.only_at_take:
        raise ConfigError(
            f"{order}, which would become staler than buffer.max_staleness = {max_staleness}; raise"
            f" it to {math.ceil(needed / groups_per_step) + 1}, or set the order to 'oldest'."
        )
