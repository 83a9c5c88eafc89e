"""Shaping of scored groups before training: length penalties, selection, filters.

Each is a plug-in: a frozen dataclass whose fields are the keys of its table, or a user's function
with the same signature. All are called in threads, because any of them may be user code.

A selection chooses the episodes to train, if rollout.oversample generates more than needed. A
filter returns a scored group, possibly with masked tokens, or None to drop it; another group is
generated in its place. A length penalty is a part of the score that depends only on the number of
sampled tokens. Whether an episode is solved is decided without penalties.

Promise: whatever a selection returns, a group gets exactly `keep` different episodes, or one
ScoreError. Its random generator depends only on the run's seed and the group. Each filter sees each
group once, in order, as the filter before left it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from millrace.config import FASTEST
from millrace.core.errors import ConfigError, Filtered, ScoreError, user_code
from millrace.core.plugins import build_callable, plugin
from millrace.core.protocols import Filter, Selection
from millrace.core.records import Episode, Group, Rollout, Score

SELECTION_SECTION = "rollout.selection"
FILTER_SECTION = "rollout.filter"
PENALTY_SECTION = "scoring.penalty"
UNSELECTED = "unselected"
ROC = "roc"


@plugin
class FirstSelection:
    """The first episodes in the order of their requests, which is independent of their scores."""

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> list[int]:
        return list(range(keep))


@plugin
class RocSelection:
    """Resample on correct (GRPO-RoC): random failures, so that they stay diverse, and the cleanest
    successes. Both keep their share of the group, but at least one episode each if there is one.
    Successes are sorted: those not cut by length first, then by `quality`, then the shortest."""

    solved_at: float = 1.0  # minimum score of a success
    quality: str | None = None  # score part that says how clean an episode is; higher is better

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> list[int]:
        solved = [score.is_solved(self.solved_at) for score in group.scores]
        successes = [index for index, is_solved in enumerate(solved) if is_solved]
        failures = [index for index, is_solved in enumerate(solved) if not is_solved]
        num_failures = _share(len(failures), len(solved), keep=keep)
        kept = rng.permutation(failures)[:num_failures].tolist()
        successes.sort(key=lambda index: self._flaws(group, index))
        return sorted([*map(int, kept), *successes[: keep - num_failures]])

    def _flaws(self, group: Group, index: int) -> tuple[bool, float, int]:
        episode, score = group.episodes[index], group.scores[index]
        quality = 0.0
        if self.quality is not None:
            if self.quality not in score.parts:
                raise ScoreError(
                    f"{SELECTION_SECTION}.quality = {self.quality!r} is not a part of the score;"
                    f" name one of {', '.join(score.parts)}."
                )
            quality = score.parts[self.quality] or 0.0
        return episode.turns[-1].finish == "length", -quality, _num_sampled(episode)


def _num_sampled(episode: Episode) -> int:
    """Sampled tokens, with those that a branch shares with its parent, which trains them."""
    shared = 0 if episode.branching is None else episode.branching.place
    return shared + sum(rollout.num_sampled for rollout in episode.rollouts)


# Of the fastest, the environment plays no more than are kept.
SELECTIONS: dict[str, type] = {ROC: RocSelection, "first": FirstSelection, FASTEST: FirstSelection}


def build_selection(table: Mapping[str, Any]) -> Selection:
    keywords, section = ("keep", "rng"), SELECTION_SECTION
    return build_callable(
        table, builtins=SELECTIONS, default=ROC, section=section, keywords=keywords
    )


def select(group: Group, selection: Selection, *, keep: int, seed: int) -> Group:
    rng = np.random.default_rng((seed % 2**64, group.number))
    with user_code(f"Selection (group {group.number})"):
        chosen = [int(index) for index in selection(group, keep=keep, rng=rng)]
    valid = set(chosen).intersection(range(len(group.episodes)))
    if not len(chosen) == len(valid) == keep:
        raise ScoreError(
            f"Selection returned {chosen} for group {group.number}; return {keep} different indices"
            f" of its {len(group.episodes)} episodes."
        )
    return replace(
        group,
        episodes=tuple(group.episodes[index] for index in chosen),
        scores=tuple(group.scores[index] for index in chosen),
    )


def _share(part: int, whole: int, *, keep: int) -> int:
    """Return how many of `keep` episodes come from `part` of the `whole`; at least 1 of each."""
    fair = (2 * keep * part + whole) // (2 * whole)  # rounded half up
    other = whole - part
    fewest = max(keep - other, min(part, 1))
    most = min(part, keep - min(other, 1))
    return min(max(fair, fewest), most)


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


@dataclass(frozen=True, slots=True)
class Filters:
    by_name: Mapping[str, Filter] = field(default_factory=dict[str, Filter])

    def __call__(self, group: Group, *, wasted: Counter[str]) -> Group:
        """Return the filtered group, and count untrained tokens in `wasted`; raises Filtered."""
        num_sampled = group.num_sampled if self.by_name else 0
        for name, filter_ in self.by_name.items():
            with user_code(f"Filter {name!r} (group {group.number})"):
                left: Any = filter_(group)
            if left is not None and not isinstance(left, Group):
                raise ScoreError(f"Filter {name!r} returned {left!r}; return the group, or None.")
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
        name = str(table.get("type", "zero_variance")).rpartition(":")[2]
        while name in filters:  # two of one type, with different settings
            name += "'"
        filters[name] = build_callable(
            table, builtins=FILTERS, default="zero_variance", section=FILTER_SECTION
        )
    return Filters(filters)


def _untrained(rollout: Rollout) -> Rollout:
    """Keep the tokens and their versions, but train none of them."""
    mask = np.zeros(len(rollout.tokens), bool)
    logprobs = np.zeros(len(rollout.tokens), np.float32)
    return replace(rollout, mask=mask, engine_logprobs=logprobs, kept=None)


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
    """Like "linear", but flat at both ends: -(1 - cos(pi x)) / 2."""

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
        lengths = [_num_sampled(episode) for episode in group.episodes]
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

    def penalize(self, group: Group) -> Group:
        """Add a part for each penalty to the scores, and its weighted value to their totals."""
        by_episode = zip(*(penalty.score(group) for penalty in self.penalties), strict=True)
        return replace(group, scores=tuple(map(self._penalized, group.scores, by_episode)))

    def select(self, group: Group, *, wasted: Counter[str]) -> Group:
        if self.keep is None or len(group.episodes) <= self.keep:
            return group
        selected = select(group, self.selection, keep=self.keep, seed=self.seed)
        wasted[UNSELECTED] += group.num_sampled - selected.num_sampled
        return selected

    def _penalized(self, score: Score, values: Sequence[float]) -> Score:
        pairs = list(zip(self.penalties, values, strict=True))
        weighted = [penalty.weight * value for penalty, value in pairs]
        return replace(
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
