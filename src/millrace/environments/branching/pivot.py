"""Pivot resampling: episodes are finished, and played again from the tokens that matter most."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from millrace.core.errors import ConfigError, TaskError
from millrace.core.plugins import load_reference
from millrace.core.records import Episode, Rollout
from millrace.environments.branching.scheduler import (
    BranchLeaf,
    BranchScheduler,
    by_place,
    together,
)
from millrace.environments.episode_runner import EpisodeRunner

Measure = Literal["entropy", "surprisal", "value", "chance"]
MEASURES: tuple[str, ...] = get_args(Measure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """Each tree has a root, and `branches` further episodes from each of its `pivots`."""

    pivots: int = 1
    """Tokens of a root at which it is branched."""
    branches: int = 3
    """Further episodes from each of them, beside the root itself."""
    by: Measure | str = "surprisal"
    """Which tokens: "surprisal" takes those that the model found least likely (-logprob, one draw
    of the entropy), "entropy" those before which it was least sure, "value" the beginnings of the
    steps that a process reward model finds worst, "chance" any, and "module:function" those for
    which that says the most: called with a Leaf, it returns a number for each of `leaf.places`."""

    def __post_init__(self) -> None:
        if self.pivots < 1 or self.branches < 1:
            raise ValueError("pivots and branches must be at least 1")
        if self.by not in MEASURES and ":" not in self.by:
            known = ", ".join(map(repr, MEASURES))
            raise ValueError(f"by = {self.by!r} must be {known} or 'module:function'")

    @property
    def size(self) -> int:
        """Episodes of a tree."""
        return 1 + self.pivots * self.branches

    def check(self, n: int) -> None:
        if n < self.size:
            raise ConfigError(
                f"environment.recipe 'pivot' with pivots = {self.pivots} and branches ="
                f" {self.branches} makes trees of {self.size} episodes, but a group has {n}; raise"
                " rollout.group_size."
            )
        if ":" in self.by:
            load_reference(self.by)

    async def play(self, stage: EpisodeRunner, n: int) -> list[Episode]:
        grove = BranchScheduler(stage)
        return await grove.grow(n, size=self.size, tree=lambda: self._tree(grove, stage))

    async def _tree(self, grove: BranchScheduler, stage: EpisodeRunner) -> None:
        root = await grove.plant()
        weights = await self._weights(root, stage)
        best = root.places[np.argsort(-weights, kind="stable")]
        # Where there are fewer tokens than pivots, some are taken more than once.
        chosen = np.resize(best, self.pivots).tolist()
        await together(
            grove.branch(root, place=place) for place in chosen for _ in range(self.branches)
        )

    async def _weights(self, leaf: BranchLeaf, stage: EpisodeRunner) -> np.ndarray:
        """[M] of its places: how much each of them matters."""
        episode, number = leaf.episode, leaf.branching.number
        match self.by:
            case "surprisal":
                return leaf.surprisals
            case "entropy":
                return by_place(episode, await stage.policy.entropies(episode.rollouts))
            case "value":
                rewards = await stage.policy.token_rewards(number)
                worth = zip(episode.rollouts, rewards, strict=True)
                return by_place(episode, [_demerits(*each) for each in worth])
            case "chance":
                rng = np.random.default_rng((stage.policy.seed, number))
                return rng.random(len(leaf.places))
            case reference:
                return _own_weights(load_reference(reference), leaf, by=reference)


def _demerits(rollout: Rollout, rewards: np.ndarray) -> np.ndarray:
    """[L]; where a step begins, minus its reward, which lies at its end. Branched there, the whole
    step is sampled again. Other tokens come last."""
    demerits = np.full(len(rewards), -np.inf)
    sampled = np.flatnonzero(rollout.mask)
    begin = 0
    for i, token in enumerate(sampled):
        if rewards[token] != 0:
            demerits[sampled[begin]] = -rewards[token]
            begin = i + 1
    return demerits


def _own_weights(
    function: Callable[[BranchLeaf], object], leaf: BranchLeaf, *, by: str
) -> np.ndarray:
    weights = np.asarray(function(leaf), np.float64)
    if weights.shape != leaf.places.shape or not np.isfinite(weights).all():
        raise TaskError(
            f"environment.recipe.by = {by!r} returned {weights!r:.80}; return a finite number for"
            f" each of the {len(leaf.places)} places."
        )
    return weights
