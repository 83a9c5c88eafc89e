"""Advantages of episodes that are branches of one another: each stretch of tokens is compared with
what came of the others that begin where it begins.

The tokens of a tree lie in stretches, from one branching to the next. What a stretch is worth is
the mean over what follows it: the stretches that begin at its end or, at the end of an episode, the
episode's score. Its advantage is that minus the worth of the stretch before it; for the first
stretch of a tree, minus the mean of the group's trees.

So the tokens behind a pivot are compared with their siblings alone, those before it have the mean
of what came of them, and along each episode the advantages add up to its score minus the mean.

A stretch that several episodes share is trained once, and stands for all of them: it weighs as many
times as much. Then the gradient is, on average, that of as many episodes which share nothing.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from millrace.core.records import Branching, Group, Rollout

Stretch = tuple[int, int]  # number of the episode that sampled it, and which of that one's


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeAdvantages:
    """Where nothing branches, each total minus the group's mean."""

    normalize_std: bool = True
    """Divide by the deviation of the group's scores."""
    epsilon: float = 1e-4
    weigh_shared: bool = True
    """Multiply by the number of episodes that share a token."""

    handles_agents = True  # it compares each with itself; see scoring/agents.py

    def __post_init__(self) -> None:
        for name in ("normalize_std", "weigh_shared"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} = {value!r} must be true or false")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon = {self.epsilon!r} must be a finite number, at least 0")

    def __call__(self, group: Group) -> list[np.ndarray]:  # [L] for each rollout
        forest = _Forest(group)
        agents = dict.fromkeys(rollout.agent for rollout in group.rollouts)
        by_agent = {name: self._of_agent(forest, group, name) for name in agents}
        return [
            forest.by_token(index, rollout, by_agent[rollout.agent])
            for index, episode in enumerate(group.episodes)
            for rollout in episode.rollouts
        ]

    def _of_agent(self, forest: "_Forest", group: Group, name: str) -> dict[Stretch, float]:
        scores = np.array([score.of_agent(name) for score in group.scores], np.float64)
        if scores.max() == scores.min():  # exactly 0, whatever rounding would say
            return defaultdict(float)
        scale = scores.std(ddof=1) + self.epsilon if self.normalize_std else 1.0
        return {
            stretch: (value * sharers if self.weigh_shared else value) / scale
            for stretch, (value, sharers) in forest.advantages(scores.tolist()).items()
        }


class _Forest:
    """The trees of a group. One that lacks an episode, since not all are trained, is seen as far as
    it is there."""

    def __init__(self, group: Group) -> None:
        self._branchings = [
            episode.branching or Branching(number=-1 - index)  # a tree of its own
            for index, episode in enumerate(group.episodes)
        ]
        self._known = {branching.number: branching for branching in self._branchings}
        points: defaultdict[int, set[int]] = defaultdict(set)
        for branching in self._branchings:
            if branching.parent is not None:
                points[branching.parent].add(branching.place)
        self._points = {number: sorted(places) for number, places in points.items()}

    def advantages(self, scores: list[float]) -> dict[Stretch, tuple[float, int]]:
        """By stretch, given the scores of all episodes; and how many of them share it."""
        ends = {b.number: score for b, score in zip(self._branchings, scores, strict=True)}
        followers: defaultdict[Stretch | None, list[Stretch]] = defaultdict(list)
        numbers = dict.fromkeys([*self._known, *self._points])
        for number in numbers:
            count = len(self._points.get(number, ()))
            last = count if number in ends else count - 1
            followers[self._before(number)].append((number, 0))
            for index in range(last):
                followers[number, index].append((number, index + 1))
        worths: dict[Stretch, float] = {}
        sharers: dict[Stretch, int] = {}

        def worth(stretch: Stretch) -> float:
            number, index = stretch
            values = [worth(follower) for follower in followers[stretch]]
            sharers[stretch] = sum(sharers[follower] for follower in followers[stretch])
            if number in ends and index == len(self._points.get(number, ())):
                values.append(ends[number])
                sharers[stretch] += 1
            worths[stretch] = float(np.mean(values))
            return worths[stretch]

        overall = float(np.mean([worth(root) for root in followers[None]]))
        return {
            follower: (
                worths[follower] - (overall if stretch is None else worths[stretch]),
                sharers[follower],
            )
            for stretch, those in followers.items()
            for follower in those
        }

    def by_token(self, index: int, rollout: Rollout, found: dict[Stretch, float]) -> np.ndarray:
        """[L] of a rollout of this episode; 0 where it trains nothing."""
        number = self._branchings[index].number
        places = rollout.places
        if places is None:
            return np.full(len(rollout.tokens), found[number, 0], np.float32)
        stretches = np.searchsorted(self._points.get(number, []), places, side="right")
        values = np.array([found[number, i] for i in range(stretches.max() + 1)], np.float32)
        return np.where(rollout.mask, values[stretches], 0).astype(np.float32)

    def _before(self, number: int) -> Stretch | None:
        """The stretch at whose end an episode branches off."""
        branching = self._known.get(number)
        if branching is None or branching.parent is None:
            return None
        return branching.parent, self._points[branching.parent].index(branching.place)
