"""Shaping of scored groups before training: penalties, selection, filters.

Called in threads, because any of these may be user code.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.protocols import Selection
from millrace.core.records import Group, Score
from millrace.scoring.shaping.filters import Filters, build_filters
from millrace.scoring.shaping.penalties import Penalty, build_penalties
from millrace.scoring.shaping.selection import FirstSelection, build_selection, select

UNSELECTED = "unselected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    penalties: tuple[Penalty, ...] = ()
    filters: Filters = field(default_factory=Filters)
    selection: Selection = field(default_factory=FirstSelection)
    keep: int | None = None  # episodes of a group that are trained; None = all
    seed: int = 0

    def penalize(self, group: Group, scores: Sequence[Score]) -> tuple[Score, ...]:
        """Return scores with a part for each penalty and its weighted value in the total."""
        by_penalty = [penalty.score(group) for penalty in self.penalties]
        by_episode = zip(*by_penalty, strict=True)
        return tuple(map(self._penalized, scores, by_episode))

    def select(self, group: Group, *, wasted: Counter[str]) -> Group:
        if self.keep is None or len(group.episodes) <= self.keep:
            return group
        selected = select(group, self.selection, keep=self.keep, seed=self.seed)
        wasted[UNSELECTED] += group.num_sampled - selected.num_sampled
        return selected

    def _penalized(self, score: Score, values: Sequence[float]) -> Score:
        pairs = list(zip(self.penalties, values, strict=True))
        weighted = [penalty.weight * value for penalty, value in pairs]
        return dataclasses.replace(
            score,
            total=math.fsum([score.total, *weighted]),
            parts={**score.parts, **{penalty.name: value for penalty, value in pairs}},
            unpenalized=score.total,
            by_agent={a: math.fsum([total, *weighted]) for a, total in score.by_agent.items()},
        )


def build_shaping(
    *,
    penalties: Sequence[Mapping[str, Any]],
    filters: Sequence[Mapping[str, Any]],
    selection: Mapping[str, Any],
    keep: int,
    seed: int,
    scorers: Sequence[str],
) -> Shaping:
    """Build the shaping of the settings tables. Penalties must not have the names of `scorers`."""
    built = build_penalties(penalties)
    names = [*scorers, *(penalty.name for penalty in built)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Two parts of the score are named {name!r}; give one of the [[scoring.penalty]]"
                " tables another name."
            )
    return Shaping(
        penalties=built,
        filters=build_filters(filters),
        selection=build_selection(selection),
        keep=keep,
        seed=seed,
    )
