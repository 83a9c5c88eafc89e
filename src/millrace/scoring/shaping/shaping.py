"""Shaping of scored groups before training: length penalties, selection, filters.

A length penalty is a part of the score that depends only on the number of sampled tokens. It is a
plug-in: a frozen dataclass whose fields are the keys of a [[scoring.penalty]] table, called with a
number of tokens. Whether an episode is solved is decided without penalties.

All of this is called in threads, because any of it may be user code.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.errors import ConfigError, ScoreError, user_code
from millrace.core.plugins import build_callable, plugin
from millrace.core.protocols import Selection
from millrace.core.records import Group, Score
from millrace.scoring.shaping.filters import Filters, build_filters
from millrace.scoring.shaping.selection import FirstSelection, build_selection, select

PENALTY_SECTION = "scoring.penalty"
UNSELECTED = "unselected"


@plugin
class SoftOverlong:
    """DAPO's soft overlong punishment: 0 up to max_tokens - buffer_tokens, then linear down to -1
    at max_tokens, and -1 beyond."""

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"buffer_tokens = {self.buffer_tokens!r} must be above 0 and at most max_tokens ="
                f" {self.max_tokens!r}"
            )

    def __call__(self, num_tokens: int) -> float:
        excess = num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(max(excess / self.buffer_tokens, 0.0), 1.0)


@plugin
class LinearLength:
    """Linear from 0 at from_tokens to -1 at max_tokens; constant outside."""

    max_tokens: int
    from_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.from_tokens < self.max_tokens:
            raise ValueError(
                f"from_tokens = {self.from_tokens!r} must be at least 0 and below max_tokens ="
                f" {self.max_tokens}"
            )

    def __call__(self, num_tokens: int) -> float:
        return -min(max(num_tokens - self.from_tokens, 0) / (self.max_tokens - self.from_tokens), 1)


@plugin
class CosineLength(LinearLength):
    """As "linear", but flat at both ends: -(1 - cos(pi x)) / 2."""

    def __call__(self, num_tokens: int) -> float:
        return -(1 - math.cos(math.pi * LinearLength.__call__(self, num_tokens))) / 2


PENALTIES: dict[str, type] = {
    "soft_overlong": SoftOverlong,
    "linear": LinearLength,
    "cosine": CosineLength,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """A length penalty with its name and weight. Called in a thread: it may be user code."""

    name: str
    weight: float
    of_tokens: Callable[[int], float] = field(repr=False)

    def score(self, group: Group) -> list[float]:
        lengths = [sum(r.num_sampled for r in episode.rollouts) for episode in group.episodes]
        with user_code(f"Penalty {self.name!r}"):
            values = [float(self.of_tokens(length)) for length in lengths]
        if not all(math.isfinite(value) for value in values):
            raise ScoreError(f"Penalty {self.name!r} returned {values}; return finite numbers.")
        return values


def build_penalties(tables: Sequence[Mapping[str, Any]]) -> tuple[Penalty, ...]:
    """Build the penalties of the [[scoring.penalty]] tables; each may have `name` and `weight`."""
    penalties: list[Penalty] = []
    for table in tables:
        settings = dict(table)
        kind = str(settings.get("type", "soft_overlong"))
        name, weight = settings.pop("name", kind.rpartition(":")[2]), settings.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{PENALTY_SECTION}.weight = {weight!r} of {name!r} is not a number.")
        of_tokens = build_callable(
            settings, builtins=PENALTIES, default="soft_overlong", section=PENALTY_SECTION
        )
        penalties.append(Penalty(name=str(name), weight=float(weight), of_tokens=of_tokens))
    return tuple(penalties)


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
