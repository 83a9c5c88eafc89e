"""The trees of one group while they grow: episodes that are played, and branches of them.

Promise: a group has as many episodes as it should, each told to its policy when it has ended. Where
an environment does not come to the same point a second time, another root is played instead of the
branch, and counted. Called on the controller's event loop.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from millrace.core.records import Branching, Episode
from millrace.environments.episode_runner import Branch, EpisodeRunner
from millrace.environments.replay.answers import ReplayError
from millrace.environments.replay.schema import Recording

T = TypeVar("T")
DIVERGED = "branches_diverged"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BranchLeaf:
    """An episode of a tree. M = tokens of its own that are trained."""

    episode: Episode
    recording: Recording
    branching: Branching
    family: int  # number of the root of its tree
    places: np.ndarray  # [M] int; ascending: where it may be branched
    surprisals: np.ndarray  # [M] float32; -logprob of each of these tokens


class BranchScheduler:
    def __init__(self, stage: EpisodeRunner) -> None:
        self._stage = stage
        self._numbers = itertools.count()
        self._episodes: dict[int, Episode] = {}

    async def grow(
        self, n: int, *, size: int, tree: Callable[[], Coroutine[Any, Any, object]]
    ) -> list[Episode]:
        """n episodes: as many trees of that size as there is room for, and roots beside them."""
        num_trees, num_alone = divmod(n, size)
        trees = [tree() for _ in range(num_trees)]
        await together([*trees, *(self.plant() for _ in range(num_alone))])
        return [self._episodes[number] for number in sorted(self._episodes)]

    async def plant(self) -> BranchLeaf:
        """A new episode, from its beginning."""
        return await self._root(next(self._numbers))

    async def branch(self, leaf: BranchLeaf, *, place: int) -> BranchLeaf:
        """An episode that is the same as this one up to the token sampled there, and then new."""
        number = next(self._numbers)
        branching = Branching(number=number, parent=leaf.branching.number, place=place)
        turn, at = _turn_at(leaf.recording, place)
        branch = Branch(recording=leaf.recording, turn=turn, at=at, family=leaf.family)
        try:
            return await self._played(branching, family=leaf.family, branch=branch)
        except ReplayError:
            return await self._root(number, counts={DIVERGED: 1})

    async def _root(self, number: int, *, counts: dict[str, int] | None = None) -> BranchLeaf:
        return await self._played(Branching(number=number), family=number, counts=counts)

    async def _played(
        self,
        branching: Branching,
        *,
        family: int,
        branch: Branch | None = None,
        counts: dict[str, int] | None = None,
    ) -> BranchLeaf:
        number = branching.number
        performance = await self._stage.play(number, branching=branching, branch=branch)
        episode = performance.episode
        episode = replace(episode, counts={**episode.counts, **(counts or {})})
        self._episodes[number] = episode
        self._stage.policy.finished(number, episode)
        assert performance.recording is not None
        places = [rollout.places for rollout in episode.rollouts]
        surprisals = [-rollout.engine_logprobs for rollout in episode.rollouts]
        return BranchLeaf(
            episode=episode,
            recording=performance.recording,
            branching=branching,
            family=family,
            places=by_place(episode, places),
            surprisals=by_place(episode, surprisals),
        )


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; with the first that raises, the others are ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def by_place(episode: Episode, columns: Sequence[np.ndarray | None]) -> np.ndarray:
    """[M] of an array [L] for each of its rollouts: the numbers of the tokens that it trains, in
    the order of their places."""
    places: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for rollout, column in zip(episode.rollouts, columns, strict=True):
        assert rollout.places is not None
        assert column is not None
        places.append(rollout.places[rollout.mask])
        numbers.append(column[rollout.mask])
    return np.concatenate(numbers)[np.argsort(np.concatenate(places))]


def _turn_at(recording: Recording, place: int) -> tuple[Any, int]:
    """The turn in which a token was sampled, and how many tokens of it came before."""
    for turn in recording.turns:
        if place < len(turn.tokens):
            return turn, place
        place -= len(turn.tokens)
    raise AssertionError("a place lies within its episode")
