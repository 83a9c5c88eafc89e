import dataclasses

import numpy as np
import pytest
from fakes import make_rollout

from millrace.core.errors import ScoreError
from millrace.core.records import Episode, Group, Score, Task, Turn
from millrace.scoring.advantages import (
    BatchAdvantages,
    GroupAdvantages,
    ReturnAdvantages,
    estimate_by_agent,
    with_advantages,
)
from millrace.scoring.pool import combine
from millrace.scoring.shaping import ZeroVariance

PLAIN = GroupAdvantages(normalize_std=False)


def group_of(*rewards: dict[str, float]) -> Group:
    """One episode per dict of rewards, with one rollout per agent."""
    episodes = [
        Episode(
            turns=(Turn(prompt="", completion="", finish="stop"),),
            rollouts=tuple(
                dataclasses.replace(make_rollout(seed=number), agent=name) for name in of_episode
            ),
            reward=of_episode,
        )
        for number, of_episode in enumerate(rewards)
    ]
    group = Group(number=3, task=Task(prompt=""), episodes=tuple(episodes))
    return combine(group, [], scorers=[])


def estimated(group: Group, estimator=PLAIN) -> list[tuple[str, float]]:
    found = with_advantages(group, estimate_by_agent(estimator, group)).token_advantages
    assert found is not None
    pairs = zip(group.rollouts, found, strict=True)
    return [(rollout.agent, float(tokens[rollout.mask][0])) for rollout, tokens in pairs]


def test_each_agent_is_compared_with_itself():
    group = group_of({"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 8.0})
    assert estimated(group) == [("a", -1.0), ("b", -4.0), ("a", 1.0), ("b", 4.0)]
    assert [score.total for score in group.scores] == [0.5, 5.5]
    assert group.scores[0].parts == {"environment.a": 1.0, "environment.b": 0.0}


def test_agent_missing_from_an_episode_is_compared_with_its_other_episodes():
    group = group_of({"a": -1.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0})
    assert estimated(group) == [("a", -1.0), ("a", 0.0), ("b", 0.5), ("a", 1.0), ("b", -0.5)]


def test_token_estimators_are_called_once_per_agent():
    group = group_of({"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 8.0})
    estimator = ReturnAdvantages(normalize_std=False)
    assert estimated(group, estimator) == estimated(group)


def test_scores_of_scorers_count_for_all_agents():
    @dataclasses.dataclass
    class Shared:
        name = "shared"
        weight = 2.0

    from millrace.core.records import ScorerResult

    group = group_of({"a": 1.0, "b": 3.0})
    (score,) = combine(group, [[ScorerResult(score=0.5)]], scorers=[Shared()]).scores  # type: ignore[list-item]
    assert score.by_agent == {"a": 2.0, "b": 4.0}
    assert score.total == 3.0


def test_zero_variance_filter_keeps_groups_whose_agents_differ():
    assert ZeroVariance()(group_of({"a": 1.0, "b": -1.0}, {"a": -1.0, "b": 1.0})) is not None
    assert ZeroVariance()(group_of({"a": 1.0, "b": -1.0}, {"a": 1.0, "b": -1.0})) is None


def test_batch_estimators_refuse_separate_agent_rewards():
    with pytest.raises(ScoreError, match="'BatchAdvantages' compare several groups"):
        estimate_by_agent(BatchAdvantages(), group_of({"a": 1.0}, {"a": 0.0}))


def test_shared_reward_is_estimated_without_splitting_agents():
    group = group_of({"a": 1.0}, {"a": 0.0})
    shared = dataclasses.replace(
        group, scores=tuple(Score(total=float(i), parts={}) for i in range(2))
    )
    np.testing.assert_array_equal(estimate_by_agent(PLAIN, shared), PLAIN(shared))
