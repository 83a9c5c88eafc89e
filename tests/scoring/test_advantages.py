import numpy as np
import pytest
from fakes import make_rollout

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task
from millrace.scoring.advantages import (
    BatchAdvantages,
    BestWorstAdvantages,
    GroupAdvantages,
    LeaveOneOutAdvantages,
    ReturnAdvantages,
    build_advantages,
    with_advantages,
)


def scored(*totals: float, rollouts: list[Rollout] | None = None) -> Group:
    """One episode with one rollout per total."""
    rollouts = rollouts or [make_rollout(seed=i) for i in range(len(totals))]
    return Group(
        number=3,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        scores=tuple(Score(total=total, parts={}) for total in totals),
    )


def rollout_of(mask: list[int], rewards: list[float] | None) -> Rollout:
    length = len(mask)
    return Rollout(
        tokens=np.zeros(length, np.int32),
        mask=np.array(mask, bool),
        engine_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        sampling=Sampling(),
        rewards=None if rewards is None else np.array(rewards, np.float32),
    )


# Minus the mean of the group


def test_advantages_are_deviations_from_the_mean_over_the_std():
    # Mean 2, deviations -1, -1, 2; variance (1 + 1 + 4) / 2 = 3.
    advantages = GroupAdvantages(epsilon=0.0)(scored(1.0, 1.0, 4.0))
    np.testing.assert_allclose(advantages, np.array([-1.0, -1.0, 2.0]) / 3**0.5)


def test_epsilon_is_added_to_the_std():
    # Mean 1, deviations -1, 1; variance (1 + 1) / 1 = 2.
    advantages = GroupAdvantages(epsilon=0.5)(scored(0.0, 2.0))
    np.testing.assert_allclose(advantages, [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)])


def test_without_normalisation_only_the_mean_is_subtracted():
    advantages = GroupAdvantages(normalize_std=False)(scored(0.0, 1.0, 5.0))
    np.testing.assert_array_equal(advantages, [-2.0, -1.0, 3.0])


@pytest.mark.parametrize(
    "estimator",
    [
        GroupAdvantages(epsilon=0.0),
        GroupAdvantages(normalize_std=False),
        LeaveOneOutAdvantages(),
        BestWorstAdvantages(),
        ReturnAdvantages(epsilon=0.0),
    ],
)
@pytest.mark.parametrize("totals", [[0.1] * 3, [0.7] * 7, [1.0], [-3.0] * 8])
def test_a_group_without_variance_gives_exact_zeros(totals, estimator):
    group = scored(*totals)
    assert not with_advantages(group, estimator(group)).advantages.any()


# Minus the mean of the others


def test_leave_one_out_subtracts_the_mean_of_the_others():
    advantages = LeaveOneOutAdvantages()(scored(1.0, 2.0, 6.0))
    np.testing.assert_allclose(advantages, [1 - 4, 2 - 3.5, 6 - 1.5])


# Pairs


def test_best_and_worst_episode_form_a_pair():
    assert BestWorstAdvantages()(scored(2.0, 3.0, 1.0, 3.0)).tolist() == [0, 1, -1, 0]


# Over the groups of a step


def test_batch_advantages_are_normalised_over_all_groups_of_the_step():
    groups = [scored(0.0, 0.0), scored(2.0, 6.0)]
    found = BatchAdvantages(epsilon=0.0).over_batch(groups)
    # Mean 2; squares 4, 4, 0, 16 over 3.
    expected = np.array([-2, -2, 0, 4]) / 8**0.5
    np.testing.assert_allclose(np.concatenate(found), expected)
    assert [len(part) for part in found] == [2, 2]


def test_batch_advantages_may_keep_the_baseline_of_the_group():
    groups = [scored(0.0, 0.0), scored(2.0, 6.0)]
    found = BatchAdvantages(baseline="group", epsilon=0.0).over_batch(groups)
    # Deviations 0, 0, -2, 2: squares 8 over 3.
    np.testing.assert_allclose(np.concatenate(found), np.array([0, 0, -2, 2]) / (8 / 3) ** 0.5)


def test_a_step_without_variance_gives_exact_zeros():
    for baseline in ("batch", "group"):
        found = BatchAdvantages(baseline=baseline, epsilon=0.0).over_batch(
            [scored(0.1), scored(0.1)]
        )
        assert not np.concatenate(found).any()


# By token


def test_returns_add_up_the_rewards_that_follow_a_token_and_the_score():
    rollouts = [rollout_of([0, 1, 1, 1], [0, 1, 0, 2]), rollout_of([0, 1, 0, 1], None)]
    group = scored(4.0, 8.0, rollouts=rollouts)
    found = ReturnAdvantages(discount=0.5, normalize_std=False)(group)
    # Rewards 1, 0, 2 + 4 -> 2.5, 3, 6; and 0, 8 -> 4, 8; their mean is 4.7.
    np.testing.assert_allclose(found[0], [0, 2.5 - 4.7, 3 - 4.7, 6 - 4.7], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0, 4 - 4.7, 0, 8 - 4.7], rtol=1e-6)


def test_returns_are_normalised_over_the_tokens_of_the_group():
    rollouts = [rollout_of([0, 1, 1], None), rollout_of([0, 1], None)]
    found = ReturnAdvantages(epsilon=0.0)(scored(0.0, 3.0, rollouts=rollouts))
    # 0, 0, 3: mean 1, variance (1 + 1 + 4) / 2.
    np.testing.assert_allclose(
        np.concatenate(found), [0, *(np.array([-1, -1]) / 3**0.5), 0, 2 / 3**0.5], rtol=1e-6
    )


def test_episode_advantages_are_the_means_of_token_advantages():
    rollouts = [rollout_of([0, 1, 1], None), rollout_of([0, 1], None)]
    group = scored(0.0, 3.0, rollouts=rollouts)
    by_token = [np.array([9.0, 1.0, 2.0]), np.array([9.0, -4.0])]
    found = with_advantages(group, by_token)
    assert found.advantages.tolist() == [1.5, -4.0]
    assert [a.dtype for a in found.token_advantages] == [np.float32] * 2


# Invalid advantages


@pytest.mark.parametrize(
    "found",
    [
        [1.0],
        [1.0, np.nan],
        [1.0, 1e300],
        None,
        [np.zeros(7), np.zeros(6)],
        [np.zeros(7)],
        "ab",
        [[1.0], 2.0],
    ],
)
def test_advantages_of_the_wrong_shape_are_refused(found):
    with pytest.raises(ScoreError, match=r"advantages of group 3 .* each of its 2 episodes needs"):
        with_advantages(scored(0.0, 1.0), found)


# Settings


def test_the_estimator_is_built_from_its_table():
    table = {"type": "group", "normalize_std": False, "epsilon": 0.01}
    assert build_advantages(table) == GroupAdvantages(normalize_std=False, epsilon=0.01)
    assert build_advantages({"type": "batch"}) == BatchAdvantages()


def ranks(group: Group, scale: float = 1.0) -> list[float]:
    totals = [score.total for score in group.scores]
    return [scale * sorted(totals).index(total) for total in totals]


def test_user_function_gets_the_group_and_the_other_keys():
    estimator = build_advantages({"type": f"{__file__}:ranks", "scale": 2.0})
    group = scored(5.0, 1.0, 3.0)
    assert with_advantages(group, estimator(group)).advantages.tolist() == [4.0, 0.0, 2.0]
    with pytest.raises(ConfigError, match="unexpected keyword argument 'scall'"):
        build_advantages({"type": f"{__file__}:ranks", "scall": 2.0})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"type": "group", "normalise_std": True}, "did you mean 'normalize_std'"),
        (
            {"type": "group", "normalize_std": "no"},
            r"normalize_std' = 'no': input should be a valid boolean",
        ),
        ({"type": "group", "epsilon": -1.0}, r"epsilon' = -1.0: .* greater than or equal to 0"),
        (
            {"type": "batch", "baseline": "run"},
            "baseline' = 'run': input should be 'batch' or 'group'",
        ),
        ({"type": "returns", "discount": 0}, "discount' = 0: input should be greater than 0"),
        ({"type": "leave_out"}, "did you mean 'leave_one_out'"),
    ],
)
def test_invalid_settings_are_refused(table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_advantages(table)
