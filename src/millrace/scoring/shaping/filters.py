"""Filters between scoring and the buffer: which groups, and which of their tokens, are worth
training.

A filter is a plug-in: a frozen dataclass whose fields are the keys of a [[rollout.filter]] table.
It is called with a scored group and returns it, perhaps with some of it masked, or None to drop it.
A group that is dropped, or has nothing left to train, is counted under the filter's name with its
tokens, and another is played in its place.

Promise: the filters of a run see each group once, in their order, each what the one before left.
Called in a thread.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from millrace.core.errors import Filtered, ScoreError
from millrace.core.plugins import build_callable
from millrace.core.protocols import Filter
from millrace.core.records import Episode, Group, Rollout

SECTION = "rollout.filter"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroVariance:
    """Drops groups whose scores are all equal: compared with each other, they teach nothing."""

    def __call__(self, group: Group) -> Group | None:
        agents = {"", *(name for score in group.scores for name in score.by_agent)}
        totals = [[score.of_agent(name) for score in group.scores] for name in agents]
        return group if any(max(own) > min(own) for own in totals) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """Keeps what was cut by length out of training: it was not finished, so its score says
    little."""

    action: Literal["mask", "drop"] = "mask"
    """"mask" the rollouts of such episodes, whose scores still count in the group's advantages; or
    "drop" the whole group."""

    def __post_init__(self) -> None:
        if self.action not in ("mask", "drop"):
            raise ValueError(f"action = {self.action!r} must be 'mask' or 'drop'")

    def __call__(self, group: Group) -> Group | None:
        is_cut = [episode.was_cut for episode in group.episodes]
        if not any(is_cut):
            return group
        if self.action == "drop":
            return None
        episodes = zip(group.episodes, is_cut, strict=True)
        return replace(group, episodes=tuple(_masked(e) if cut else e for e, cut in episodes))


FILTERS: dict[str, type] = {"zero_variance": ZeroVariance, "overlong": Overlong}


class Filters:
    """All filters of a run, by name."""

    def __init__(self, filters: Mapping[str, Filter] | None = None) -> None:
        self._filters = dict(filters or {})

    def __call__(self, group: Group, *, wasted: Counter[str]) -> Group:
        """What is left of a scored group; raises Filtered if nothing is. Tokens that are not
        trained are counted in `wasted`, by filter."""
        num_sampled = group.num_sampled if self._filters else 0
        for name, filter_ in self._filters.items():
            left = _ask(filter_, group, name=name)
            if left is not group:  # to count is to read every mask
                num_left = 0 if left is None else left.num_sampled
                if num_left < num_sampled:
                    wasted[name] += num_sampled - num_left
                num_sampled = num_left
            if left is None or num_sampled == 0:
                raise Filtered(name)
            group = left
        return group


def build_filters(tables: Sequence[Mapping[str, Any]]) -> Filters:
    """The filters of the [[rollout.filter]] tables."""
    filters: dict[str, Filter] = {}
    for table in tables:
        built = build_callable(table, builtins=FILTERS, default="zero_variance", section=SECTION)
        name = str(table.get("type", "zero_variance")).rpartition(":")[2]
        while name in filters:  # two of a kind, with different settings
            name += "'"
        filters[name] = built
    return Filters(filters)


def _ask(filter_: Filter, group: Group, *, name: str) -> Group | None:
    """A filter may be the user's own, so it may raise and return anything."""
    try:
        left: Any = filter_(group)
    except Exception as error:
        raise ScoreError(
            f"Filter {name!r} raised {type(error).__name__}: {error} (group {group.number});"
            " mend it."
        ) from error
    if left is not None and not isinstance(left, Group):
        raise ScoreError(f"Filter {name!r} returned {left!r}; return the group, or None.")
    return left


def _masked(episode: Episode) -> Episode:
    return replace(episode, rollouts=tuple(map(_untrained, episode.rollouts)))


def _untrained(rollout: Rollout) -> Rollout:
    """With its tokens and their versions, but none of them trained."""
    nothing = np.zeros(len(rollout.tokens), bool)
    silent = np.zeros(len(rollout.tokens), np.float32)
    return replace(rollout, mask=nothing, engine_logprobs=silent, kept=None)
