"""Results of several scorers become one score per episode, and token scores in its rollouts."""

from dataclasses import dataclass

import numpy as np
import pytest

from millrace.core.errors import ScoreError
from millrace.core.records import Episode, Group, Rollout, Sampling, ScorerResult, Task, TokenScores
from millrace.scoring.pool import combine


@dataclass
class Named:
    name: str
    weight: float = 1.0

    async def score(self, group: Group) -> list[ScorerResult]:
        raise AssertionError("its results are given")


def one_episode() -> Group:
    rollout = Rollout(
        tokens=np.arange(3, dtype=np.int32),
        mask=np.array([False, True, True]),
        engine_logprobs=np.zeros(3, np.float32),
        versions=np.array([-1, 0, 0], np.int32),
        sampling=Sampling(),
    )
    return Group(
        number=7, task=Task(prompt="?"), episodes=(Episode(turns=(), rollouts=(rollout,)),)
    )


def rewards(*values: float) -> ScorerResult:
    return ScorerResult(token_scores=(TokenScores(rewards=np.array(values, np.float32)),))


def test_scores_and_token_rewards_are_weighted_and_added():
    scorers = [Named("a"), Named("b", 0.5), Named("steps", 2.0)]
    columns = [[ScorerResult(score=1.0)], [ScorerResult(score=4.0)], [rewards(0, 1, -1)]]
    combined = combine(one_episode(), columns, scorers=scorers)
    assert combined.scores[0].total == 3.0
    assert combined.scores[0].parts == {"a": 1.0, "b": 4.0, "steps": None}
    assert combined.rollouts[0].rewards is not None
    assert combined.rollouts[0].rewards.tolist() == [0, 2, -2]
    twice = combine(combined, [[rewards(1, 1, 1)]], scorers=[Named("more")])
    assert twice.rollouts[0].rewards is not None
    assert twice.rollouts[0].rewards.tolist() == [1, 3, -1]


def test_token_only_scorers_have_no_score_part():
    @dataclass
    class TokenLevel(Named):
        token_scores_only: bool = True

    scorers = [Named("a"), TokenLevel("teacher"), TokenLevel("steps", token_scores_only=False)]
    columns = [[ScorerResult(score=1.0)], [rewards(0, 0, 0)], [ScorerResult(score=2.0)]]
    (score,) = combine(one_episode(), columns, scorers=scorers).scores
    assert score.parts == {"a": 1.0, "steps": 2.0}


def test_episode_without_any_score_is_an_error():
    with pytest.raises(ScoreError, match="No scorer applied to episode 0 of group 7"):
        combine(one_episode(), [[ScorerResult()]], scorers=[Named("a")])


def test_two_references_for_one_rollout_are_refused():
    reference = ScorerResult(
        token_scores=(TokenScores(reference_logprobs=np.zeros(3, np.float32)),)
    )
    with pytest.raises(ScoreError, match="'two' returns reference_logprobs"):
        combine(one_episode(), [[reference], [reference]], scorers=[Named("one"), Named("two")])
