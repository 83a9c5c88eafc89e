"""Pivot resampling: episodes are finished, and played again from the tokens that matter most."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Episode
from millrace.core.references import load_reference
from millrace.episodes.recipes.grove import Grove, Leaf, together
from millrace.episodes.stage import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """Each tree has a root, and `branches` further episodes from each of its `pivots`."""

    pivots: int = 1
    """Tokens of a root at which it is branched."""
    branches: int = 3
    """Further episodes from each of them, beside the root itself."""
    by: Literal["surprisal", "chance"] | str = "surprisal"
    """Which tokens: those that the model found least likely (-logprob, an estimate of the entropy
    it drew from), any, or those for which "module:function", called with a Leaf, says the most: one
    number for each of `leaf.places`, such as how little a model of yours expects there."""

    def __post_init__(self) -> None:
        if self.pivots < 1 or self.branches < 1:
            raise ValueError("pivots and branches must be at least 1")
        if self.by not in ("surprisal", "chance") and ":" not in self.by:
            raise ValueError(f"by = {self.by!r} must be 'surprisal', 'chance' or 'module:function'")

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

    async def play(self, stage: Stage, n: int) -> list[Episode]:
        grove = Grove(stage)
        num_trees, num_alone = divmod(n, self.size)
        await together(
            [
                *(self._tree(grove, stage) for _ in range(num_trees)),
                *(grove.plant() for _ in range(num_alone)),
            ]
        )
        return grove.episodes

    async def _tree(self, grove: Grove, stage: Stage) -> Leaf:
        root = await grove.plant()
        chosen = self._chosen(root, seed=stage.policy.seed)
        await together(
            grove.branch(root, place=place) for place in chosen for _ in range(self.branches)
        )
        return root

    def _chosen(self, leaf: Leaf, *, seed: int) -> list[int]:
        """Places; where there are fewer tokens than pivots, some are taken more than once."""
        if self.by == "chance":
            rng = np.random.default_rng((seed, leaf.branching.number))
            weights = rng.random(len(leaf.places))
        elif self.by == "surprisal":
            weights = leaf.surprisals
        else:
            weights = _weights(load_reference(self.by), leaf, by=self.by)
        best = leaf.places[np.argsort(-weights, kind="stable")]
        return np.resize(best, self.pivots).tolist()


def _weights(function: Callable[[Leaf], object], leaf: Leaf, *, by: str) -> np.ndarray:
    weights = np.asarray(function(leaf), np.float64)
    if weights.shape != leaf.places.shape or not np.isfinite(weights).all():
        raise TaskError(
            f"environment.recipe.by = {by!r} returned {weights!r:.80}; return a finite number for"
            f" each of the {len(leaf.places)} places."
        )
    return weights
