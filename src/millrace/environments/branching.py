"""Groups whose episodes are branches of each other: the recipes of [environment.recipe], which
choose the branching points, and the scheduler that plays the episode trees of one group.

Promise: a group has the requested number of episodes, and each is passed to its policy when it has
ended. If an environment does not reach the branching point a second time, a new root is played
instead of the branch, and counted. Runs on the controller's event loop.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from millrace.config.section import PositiveInt
from millrace.core.errors import ConfigError, ReplayError, TaskError, run_all
from millrace.core.plugins import build_plugin, load_reference, plugin
from millrace.core.records import Branching, Episode, Rollout
from millrace.environments.function_environment import EpisodeRunner
from millrace.environments.replay.recordings import Branch
from millrace.environments.replay.schema import Recording
from millrace.environments.rollouts.player import GroupPolicy

MEASURES = ("entropy", "surprisal", "value", "chance")


class Recipe(Protocol):
    """A plug-in whose fields are the keys of [environment.recipe]."""

    def check(self, n: int) -> None:
        """Raise ConfigError if a group of n episodes is too small."""
        ...

    async def play(self, runner: EpisodeRunner, n: int) -> list[Episode]:
        """Return n episodes for training. Called on the controller's event loop."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BranchLeaf:
    """An episode of a tree. M = trained tokens of the episode itself."""

    episode: Episode
    recording: Recording
    branching: Branching
    root: int  # number of the root of its tree
    places: np.ndarray  # [M] int, ascending; tokens at which it can be branched
    surprisals: np.ndarray  # [M] float32; -logprob of each of these tokens


class BranchScheduler:
    def __init__(self, runner: EpisodeRunner) -> None:
        self.policy = runner.policy
        self.episodes: dict[int, Episode] = {}  # by number
        self._runner = runner
        self._numbers = itertools.count()

    async def play_root(self) -> BranchLeaf:
        return await self._play(Branching(number=next(self._numbers)))

    async def play_branch(self, leaf: BranchLeaf, *, place: int) -> BranchLeaf:
        """Play an episode that equals `leaf` before the token at `place`, and then differs."""
        number = next(self._numbers)
        branching = Branching(number=number, parent=leaf.branching.number, place=place)
        turns, at = iter(leaf.recording.turns), place  # `at`: tokens of the turn that are shared
        while at >= (num_sampled := len((turn := next(turns)).completion.tokens)):
            at -= num_sampled
        branch = Branch(recording=leaf.recording, turn=turn.number, at=at, root=leaf.root)
        try:
            return await self._play(branching, branch)
        except ReplayError:
            return await self._play(Branching(number=number), branches_diverged=1)

    async def _play(
        self, branching: Branching, branch: Branch | None = None, **counts: int
    ) -> BranchLeaf:
        number = branching.number
        episode, recording = await self._runner.play(number, branching=branching, branch=branch)
        assert recording is not None
        episode = replace(episode, counts={**episode.counts, **counts})
        self.episodes[number] = episode
        self.policy.finished(number, episode)
        return BranchLeaf(
            episode=episode,
            recording=recording,
            branching=branching,
            root=number if branch is None else branch.root,
            places=by_place(episode, [r.places for r in episode.rollouts]),
            surprisals=by_place(episode, [-r.engine_logprobs for r in episode.rollouts]),
        )


def by_place(episode: Episode, columns: Sequence[np.ndarray | None]) -> np.ndarray:
    """Join an array [L] per rollout into one value [M] per trained token, ordered by place."""
    places: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for rollout, column in zip(episode.rollouts, columns, strict=True):
        assert rollout.places is not None
        assert column is not None
        places.append(rollout.places[rollout.mask])
        values.append(column[rollout.mask])
    return np.concatenate(values)[np.argsort(np.concatenate(places))]


class TreeRecipe:
    """A recipe whose groups are trees of `size` episodes, and single roots if some are left."""

    @property
    def size(self) -> int:
        raise NotImplementedError

    def check(self, n: int) -> None:
        if n < self.size:
            raise ConfigError(
                f"environment.recipe {self!r} makes trees of {self.size} episodes, but a group has"
                f" {n}; raise rollout.group_size."
            )

    async def play(self, runner: EpisodeRunner, n: int) -> list[Episode]:
        scheduler = BranchScheduler(runner)
        num_trees, num_single = divmod(n, self.size)
        trees = [self._play_tree(scheduler) for _ in range(num_trees)]
        await run_all([*trees, *(scheduler.play_root() for _ in range(num_single))])
        return [scheduler.episodes[number] for number in sorted(scheduler.episodes)]

    async def _play_tree(self, scheduler: BranchScheduler) -> None:
        raise NotImplementedError


@plugin
class Pivot(TreeRecipe):
    """Plays root episodes, then plays them again from the tokens that matter most. Each tree has a
    root, and `branches` further episodes from each of its `pivots`."""

    pivots: PositiveInt = 1  # number of tokens of a root at which it is branched
    branches: PositiveInt = 3  # number of further episodes from each of these tokens
    by: str = "surprisal"
    """Measure that selects the tokens: "surprisal" (highest -logprob, one sample of the entropy),
    "entropy" (highest entropy of the distribution), "value" (first tokens of the steps that a
    process reward model scores lowest), "chance" (uniformly random), or "module:function". A
    function gets a BranchLeaf and returns a number for each of `leaf.places`; the highest win."""

    def __post_init__(self) -> None:
        if self.by not in MEASURES and ":" not in self.by:
            known = ", ".join(map(repr, MEASURES))
            raise ValueError(f"by = {self.by!r} must be {known} or 'module:function'")

    @property
    def size(self) -> int:
        return 1 + self.pivots * self.branches

    def check(self, n: int) -> None:
        super().check(n)
        if ":" in self.by:
            load_reference(self.by)

    async def _play_tree(self, scheduler: BranchScheduler) -> None:
        root = await scheduler.play_root()
        weights = await self._weights(root, scheduler.policy)
        best = root.places[np.argsort(-weights, kind="stable")]
        # With fewer tokens than pivots, some tokens are used more than once.
        chosen = np.resize(best, self.pivots).tolist()
        await run_all(
            scheduler.play_branch(root, place=place)
            for place in chosen
            for _ in range(self.branches)
        )

    async def _weights(self, leaf: BranchLeaf, policy: GroupPolicy) -> np.ndarray:  # [M]
        episode, number = leaf.episode, leaf.branching.number
        match self.by:
            case "surprisal":
                return leaf.surprisals
            case "entropy":
                return by_place(episode, await policy.entropies(episode.rollouts))
            case "value":
                rewards = zip(episode.rollouts, await policy.token_rewards(number), strict=True)
                return by_place(episode, [_negated_steps(*each) for each in rewards])
            case "chance":
                rng = np.random.default_rng((policy.seed, number))
                return rng.random(len(leaf.places))
            case reference:
                weights = np.asarray(load_reference(reference)(leaf), np.float64)
                if weights.shape != leaf.places.shape or not np.isfinite(weights).all():
                    raise TaskError(
                        f"environment.recipe.by = {reference!r} returned {weights!r:.80}; return a"
                        f" finite number for each of the {len(leaf.places)} places."
                    )
                return weights


@plugin
class Tree(TreeRecipe):
    """Plays trees of `branches` ** `depth` leaves, each of which is an episode of the group. Levels
    divide the sampled tokens evenly: with depth = 2, the first branching point is after a third of
    the first episode, and the second one is half-way through the rest."""

    branches: Annotated[int, Field(ge=2)] = 2
    depth: PositiveInt = 2

    @property
    def size(self) -> int:
        return self.branches**self.depth

    async def _play_tree(self, scheduler: BranchScheduler) -> None:
        root = await scheduler.play_root()
        await self._branch(scheduler, root, first=0, levels=self.depth)

    async def _branch(
        self, scheduler: BranchScheduler, leaf: BranchLeaf, *, first: int, levels: int
    ) -> None:
        """Branch a leaf at or after its own token number `first`, `levels` deep."""
        if levels == 0:
            return
        cut = first + (len(leaf.places) - first) // (levels + 1)
        place = int(leaf.places[cut])

        async def play_sibling() -> None:
            sibling = await scheduler.play_branch(leaf, place=place)
            await self._branch(scheduler, sibling, first=0, levels=levels - 1)

        await run_all(
            [
                self._branch(scheduler, leaf, first=cut, levels=levels - 1),
                *(play_sibling() for _ in range(self.branches - 1)),
            ]
        )


RECIPES: dict[str, type] = {"pivot": Pivot, "tree": Tree}


def build_recipe(table: Mapping[str, Any]) -> Recipe:
    """Build a recipe, built in or "module:Name" of the user's; raises ConfigError."""
    return build_plugin(table, builtins=RECIPES, default="pivot", section="environment.recipe")


def _negated_steps(rollout: Rollout, rewards: np.ndarray) -> np.ndarray:  # [L]
    """Return minus the reward of each step, at the step's first token; -inf elsewhere. Rewards lie
    at the last token of a step. Branching at the first resamples the whole step."""
    weights = np.full(len(rewards), -np.inf)
    sampled = np.flatnonzero(rollout.mask)
    ends = np.flatnonzero(rewards[sampled])
    begins = np.concatenate([[0], ends + 1])[: len(ends)]
    weights[sampled[begins]] = -rewards[sampled[ends]]
    return weights
