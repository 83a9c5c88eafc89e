"""Plays the episode trees of one group: root episodes, and branches of them.

Promise: a group has the requested number of episodes, and each is passed to its policy when it has
ended. If an environment does not reach the branching point a second time, a new root is played
instead of the branch, and counted. Runs on the controller's event loop.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from millrace.core.errors import ReplayError, first_cause
from millrace.core.records import Branching, Episode
from millrace.environments.episode_runner import EpisodeRunner
from millrace.environments.replay.answers import Branch
from millrace.environments.replay.schema import Recording


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
        self._runner = runner
        self._numbers = itertools.count()
        self._episodes: dict[int, Episode] = {}

    async def play_group(
        self, n: int, *, size: int, play_tree: Callable[[], Coroutine[Any, Any, object]]
    ) -> list[Episode]:
        """Play n episodes: as many trees of `size` episodes as fit, and single roots."""
        num_trees, num_single = divmod(n, size)
        trees = [play_tree() for _ in range(num_trees)]
        await run_all([*trees, *(self.play_root() for _ in range(num_single))])
        return [self._episodes[number] for number in sorted(self._episodes)]

    async def play_root(self) -> BranchLeaf:
        return await self._play(Branching(number=next(self._numbers)))

    async def play_branch(self, leaf: BranchLeaf, *, place: int) -> BranchLeaf:
        """Play an episode that equals `leaf` before the token at `place`, and then differs."""
        number = next(self._numbers)
        branching = Branching(number=number, parent=leaf.branching.number, place=place)
        turn, at = _turn_at(leaf.recording, place)
        branch = Branch(recording=leaf.recording, turn=turn, at=at, root=leaf.root)
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
        self._episodes[number] = episode
        self.policy.finished(number, episode)
        return BranchLeaf(
            episode=episode,
            recording=recording,
            branching=branching,
            root=number if branch is None else branch.root,
            places=by_place(episode, [r.places for r in episode.rollouts]),
            surprisals=by_place(episode, [-r.engine_logprobs for r in episode.rollouts]),
        )


async def run_all(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run coroutines to their end; if one raises, the others are cancelled first."""
    with first_cause():
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)


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


def _turn_at(recording: Recording, place: int) -> tuple[Any, int]:
    """Return the turn that sampled a token, and how many tokens the turn sampled before it."""
    for turn in recording.turns:
        num_sampled = len(turn.completion.tokens)
        if place < num_sampled:
            return turn, place
        place -= num_sampled
    raise AssertionError("a place lies within its episode")
