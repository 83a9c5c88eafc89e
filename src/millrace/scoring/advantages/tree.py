"""Advantages of episodes that branch off one another.

The tokens of a tree form segments, from one branching point to the next. The value of a segment is
the mean of what follows it: the segments that start at its end, and at the end of an episode the
episode's score. The advantage of a segment is its value minus the value of the segment before it,
or for the first segment of a tree, minus the mean over the group's trees.

So tokens after a branching point are compared with their siblings alone, tokens before it have the
mean of all outcomes, and along each episode the advantages add up to its score minus the mean.

A segment that several episodes share is trained once on behalf of all of them, so its weight is
their number. The expected gradient is then that of as many episodes that share nothing.
"""

from collections import defaultdict

import numpy as np

from millrace.config.section import NonNegativeFloat
from millrace.core.plugins import plugin
from millrace.core.records import Branching, Group, Rollout

Segment = tuple[int, int]  # number of the episode that sampled it, index within that episode


@plugin
class TreeAdvantages:
    """Advantages by segment. Without branches: each total minus the group's mean."""

    normalize_std: bool = True
    """Divide by the standard deviation of the group's scores."""
    epsilon: NonNegativeFloat = 1e-4
    weigh_shared: bool = True
    """Multiply by the number of episodes that share the token."""

    handles_agents = True  # see AdvantagesByAgent

    def __call__(self, group: Group) -> list[np.ndarray]:  # [L] for each rollout
        forest = _Forest(group)
        agents = dict.fromkeys(rollout.agent for rollout in group.rollouts)
        by_agent = {name: self._of_agent(forest, group, name) for name in agents}
        return [
            forest.by_token(index, rollout, by_agent[rollout.agent])
            for index, episode in enumerate(group.episodes)
            for rollout in episode.rollouts
        ]

    def _of_agent(self, forest: "_Forest", group: Group, name: str) -> dict[Segment, float]:
        scores = np.array([score.of_agent(name) for score in group.scores], np.float64)
        if scores.max() == scores.min():  # exactly 0, free of rounding errors
            return defaultdict(float)
        scale = scores.std(ddof=1) + self.epsilon if self.normalize_std else 1.0
        return {
            segment: (value * sharers if self.weigh_shared else value) / scale
            for segment, (value, sharers) in forest.advantages(scores.tolist()).items()
        }


class _Forest:
    """The trees of a group. Episodes that are not trained may be missing from a tree."""

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

    def advantages(self, scores: list[float]) -> dict[Segment, tuple[float, int]]:
        """Return the advantage of each segment, and how many episodes share it."""
        ends = {b.number: score for b, score in zip(self._branchings, scores, strict=True)}
        children: defaultdict[Segment | None, list[Segment]] = defaultdict(list)
        numbers = dict.fromkeys([*self._known, *self._points])
        for number in numbers:
            count = len(self._points.get(number, ()))
            last = count if number in ends else count - 1
            children[self._before(number)].append((number, 0))
            for index in range(last):
                children[number, index].append((number, index + 1))
        values_of: dict[Segment, float] = {}
        sharers: dict[Segment, int] = {}

        def value(segment: Segment) -> float:
            number, index = segment
            values = [value(child) for child in children[segment]]
            sharers[segment] = sum(sharers[child] for child in children[segment])
            if number in ends and index == len(self._points.get(number, ())):
                values.append(ends[number])
                sharers[segment] += 1
            values_of[segment] = float(np.mean(values))
            return values_of[segment]

        overall = float(np.mean([value(root) for root in children[None]]))
        return {
            child: (
                values_of[child] - (overall if segment is None else values_of[segment]),
                sharers[child],
            )
            for segment, segments in children.items()
            for child in segments
        }

    def by_token(self, index: int, rollout: Rollout, found: dict[Segment, float]) -> np.ndarray:
        """Return [L] for a rollout of this episode; 0 where the mask is False."""
        number = self._branchings[index].number
        places = rollout.places
        if places is None:
            return np.full(len(rollout.tokens), found[number, 0], np.float32)
        segments = np.searchsorted(self._points.get(number, []), places, side="right")
        values = np.array([found[number, i] for i in range(segments.max() + 1)], np.float32)
        return np.where(rollout.mask, values[segments], 0).astype(np.float32)

    def _before(self, number: int) -> Segment | None:
        """Return the segment at whose end an episode branches off."""
        branching = self._known.get(number)
        if branching is None or branching.parent is None:
            return None
        return branching.parent, self._points[branching.parent].index(branching.place)
