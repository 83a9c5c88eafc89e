"""Filters between scoring and the buffer: drop or mask groups that are not worth training.

A filter is a plug-in: a frozen dataclass whose fields are the keys of a [[rollout.filter]] table.
It is called with a scored group and returns it, possibly with masked tokens, or None to drop it. A
group that is dropped, or fully masked, is counted under the filter's name with its tokens, and
another one is generated in its place.

Promise: each filter sees each group once, in order, as the filter before left it. Called in a
thread.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from millrace.core.errors import Filtered, ScoreError, user_code
from millrace.core.plugins import build_callable, plugin
from millrace.core.protocols import Filter
from millrace.core.records import Group, Rollout

SECTION = "rollout.filter"


@plugin
class ZeroVariance:
    """Drops groups whose scores are all equal: their advantages are 0."""

    def __call__(self, group: Group) -> Group | None:
        agents = {"", *(name for score in group.scores for name in score.by_agent)}
        totals = [[score.of_agent(name) for score in group.scores] for name in agents]
        return group if any(max(own) > min(own) for own in totals) else None


@plugin
class Overlong:
    """Excludes episodes that were cut by length: an unfinished episode has no meaningful score."""

    action: Literal["mask", "drop"] = "mask"
    """"mask": do not train these rollouts; their scores still count in the group's advantages.
    "drop": drop the whole group."""

    def __call__(self, group: Group) -> Group | None:
        is_cut = [episode.was_cut for episode in group.episodes]
        if not any(is_cut):
            return group
        if self.action == "drop":
            return None
        episodes = tuple(
            replace(episode, rollouts=tuple(map(_untrained, episode.rollouts))) if cut else episode
            for episode, cut in zip(group.episodes, is_cut, strict=True)
        )
        return replace(group, episodes=episodes)


FILTERS: dict[str, type] = {"zero_variance": ZeroVariance, "overlong": Overlong}


class Filters:
    def __init__(self, filters: Mapping[str, Filter] | None = None) -> None:
        self._filters = dict(filters or {})

    def __call__(self, group: Group, *, wasted: Counter[str]) -> Group:
        """Return the filtered group, and count untrained tokens in `wasted`; raises Filtered."""
        num_sampled = group.num_sampled if self._filters else 0
        for name, filter_ in self._filters.items():
            left = _apply(filter_, group, name=name)
            if left is not group:  # counting reads every mask, so it is skipped if possible
                num_left = 0 if left is None else left.num_sampled
                if num_left < num_sampled:
                    wasted[name] += num_sampled - num_left
                num_sampled = num_left
            if left is None or num_sampled == 0:
                raise Filtered(name)
            group = left
        return group


def build_filters(tables: Sequence[Mapping[str, Any]]) -> Filters:
    filters: dict[str, Filter] = {}
    for table in tables:
        built = build_callable(table, builtins=FILTERS, default="zero_variance", section=SECTION)
        name = str(table.get("type", "zero_variance")).rpartition(":")[2]
        while name in filters:  # two of one type, with different settings
            name += "'"
        filters[name] = built
    return Filters(filters)


def _apply(filter_: Filter, group: Group, *, name: str) -> Group | None:
    """Call a filter. It may be user code, so it may raise and return anything."""
    with user_code(f"Filter {name!r} (group {group.number})"):
        left: Any = filter_(group)
    if left is not None and not isinstance(left, Group):
        raise ScoreError(f"Filter {name!r} returned {left!r}; return the group, or None.")
    return left


def _untrained(rollout: Rollout) -> Rollout:
    """Keep the tokens and their versions, but train none of them."""
    mask = np.zeros(len(rollout.tokens), bool)
    logprobs = np.zeros(len(rollout.tokens), np.float32)
    return replace(rollout, mask=mask, engine_logprobs=logprobs, kept=None)
