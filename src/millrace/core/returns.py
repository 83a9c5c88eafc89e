"""Returns and advantages from rewards of single tokens.

N = sampled tokens of a rollout, in order.
"""

from itertools import accumulate

import numpy as np

from millrace.core.records import Rollout


def sampled_rewards(rollout: Rollout, *, score: float) -> np.ndarray:  # [N] float64
    """The rewards of a rollout at its sampled tokens, with `score` added to the last one.

    A reward at a token that was not sampled is credited to the last sampled token before it. One
    before the first sampled token is dropped.
    """
    rewards = np.zeros(rollout.num_sampled)
    if rollout.rewards is not None:
        owners = np.cumsum(rollout.mask) - 1  # [L]
        has_owner = owners >= 0
        np.add.at(rewards, owners[has_owner], rollout.rewards[has_owner])
    rewards[-1:] += score
    return rewards


def discounted_returns(rewards: np.ndarray, *, discount: float) -> np.ndarray:  # [N] float64
    """For each token its reward plus the discounted rewards after it."""
    if discount == 1.0:
        return rewards[::-1].cumsum()[::-1]

    def add_reward(later: float, reward: float) -> float:
        return reward + discount * later

    backwards: list[float] = rewards[::-1].tolist()
    later = accumulate(backwards, add_reward)
    return np.fromiter(later, np.float64, len(rewards))[::-1]


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    discount: float,
    decay: float,
    last_value: float = 0.0,
) -> np.ndarray:  # [N] float64
    """Generalized advantage estimation (arXiv 1506.02438): the sums, discounted by
    gamma * lambda, of the TD errors reward + gamma * next value - value.

    `discount` is gamma and `decay` is lambda; with lambda = 1 these are returns minus values.
    `values` [N] belong to the states before each token, `last_value` to the state after the last
    one: 0 if the episode ended there. The critic's targets are advantages + values.
    """
    following = np.append(values[1:], last_value)
    td_errors = rewards + discount * following - values
    return discounted_returns(td_errors, discount=discount * decay)
