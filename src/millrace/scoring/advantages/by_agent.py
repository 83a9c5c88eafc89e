"""Advantages of episodes with several agents: each agent is compared with itself in the other
episodes of its group.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.core.errors import ScoreError
from millrace.core.protocols import Advantages, AdvantagesByAgent, AdvantagesOverBatch
from millrace.core.records import Group, Score
from millrace.scoring.advantages.estimators import with_advantages


def by_agent(estimator: Advantages) -> Callable[[Group], Any]:
    """Wrap an estimator so that it is called once per agent if agents are rewarded separately."""

    def estimate(group: Group) -> Any:
        is_shared = not any(score.by_agent for score in group.scores)
        if is_shared or isinstance(estimator, AdvantagesByAgent):
            return estimator(group)
        if isinstance(estimator, AdvantagesOverBatch):
            raise ScoreError(
                f"Advantages {type(estimator).__name__!r} compare several groups and cannot"
                " distinguish the agents of an episode; choose another type in"
                " [scoring.advantages]."
            )
        names = dict.fromkeys(rollout.agent for rollout in group.rollouts)
        found = [np.zeros(len(rollout.tokens), np.float32) for rollout in group.rollouts]
        for name in names:
            own = iter(_by_token(estimator, _alone(group, name)))
            for index, rollout in enumerate(group.rollouts):
                if rollout.agent == name:
                    found[index] = next(own)
        return found

    estimate.__qualname__ = getattr(estimator, "__qualname__", type(estimator).__name__)
    return estimate


def _alone(group: Group, name: str) -> Group:
    """Return the episodes of one agent, with its own rollouts and scores."""
    members = [
        (
            dataclasses.replace(
                episode, rollouts=tuple(r for r in episode.rollouts if r.agent == name)
            ),
            Score(total=score.of_agent(name), parts=score.parts),
        )
        for episode, score in zip(group.episodes, group.scores, strict=True)
        if any(rollout.agent == name for rollout in episode.rollouts)
    ]
    episodes, scores = zip(*members, strict=True)
    return dataclasses.replace(group, episodes=episodes, scores=scores)


def _by_token(estimator: Advantages, group: Group) -> list[np.ndarray]:  # [L] for each rollout
    estimated = with_advantages(group, estimator(group))
    if estimated.token_advantages is not None:
        return list(estimated.token_advantages)
    assert estimated.advantages is not None
    return [
        np.full(len(rollout.tokens), advantage, np.float32)
        for episode, advantage in zip(group.episodes, estimated.advantages, strict=True)
        for rollout in episode.rollouts
    ]
