import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.records import Rollout, Sampling
from millrace.scoring.advantages import discounted_returns, gae, sampled_rewards

NUMBERS = st.lists(st.floats(-5, 5), min_size=1, max_size=12).map(np.array)


def test_a_reward_belongs_to_the_last_sampled_token_before_it():
    length = 6
    rollout = Rollout(
        tokens=np.zeros(length, np.int32),
        mask=np.array([0, 1, 0, 0, 1, 0], bool),
        engine_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        sampling=Sampling(),
        rewards=np.array([7, 1, 2, 4, 8, 16], np.float32),
    )
    assert sampled_rewards(rollout, score=100.0).tolist() == [7.0, 124.0]


@pytest.mark.parametrize(
    ("discount", "expected"), [(1.0, [6, 5, 3]), (0.5, [1 + 0.5 * 3.5, 3.5, 3]), (0.0, [1, 2, 3])]
)
def test_returns(discount, expected):
    assert discounted_returns(np.array([1.0, 2.0, 3.0]), discount=discount).tolist() == expected


def test_gae_of_three_tokens_by_hand():
    # Surprises: 0 + 0.9 * 2 - 1, 0 + 0.9 * 3 - 2, 1 + 0.9 * 0.5 - 3; each next one counts 0.45.
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0])
    found = gae(rewards, values, discount=0.9, decay=0.5, last_value=0.5)
    last = -1.55
    middle = 0.7 + 0.45 * last
    np.testing.assert_allclose(found, [0.8 + 0.45 * middle, middle, last])


@given(NUMBERS, st.floats(0.1, 1.0), st.integers(0, 100))
def test_gae_without_decay_is_returns_minus_values(rewards, discount, seed):
    values = np.random.default_rng(seed).normal(size=len(rewards))
    found = gae(rewards, values, discount=discount, decay=1.0)
    expected = discounted_returns(rewards, discount=discount) - values
    np.testing.assert_allclose(found, expected, atol=1e-9)


@given(NUMBERS, st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_exact_values_give_zero_advantages(rewards, discount, decay):
    values = discounted_returns(rewards, discount=discount)
    found = gae(rewards, values, discount=discount, decay=decay)
    np.testing.assert_allclose(found, 0.0, atol=1e-9)
