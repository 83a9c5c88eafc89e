"""Rewards of single tokens -> what each token leads to.

N = sampled tokens of a rollout, in order.
"""

from itertools import accumulate

import numpy as np

from millrace.core.records import Rollout


def sampled_rewards(rollout: Rollout, *, score: float) -> np.ndarray:  # [N] float64
    """The rewards of a rollout at its sampled tokens, with `score` at the last of them.

    A reward at a token that was not sampled belongs to the last sampled one before it, which
    brought it about; before the first there is none that did.
    """
    rewards = np.zeros(rollout.num_sampled)
    if rollout.rewards is not None:
        owners = np.cumsum(rollout.mask) - 1  # [L]
        has_owner = owners >= 0
        np.add.at(rewards, owners[has_owner], rollout.rewards[has_owner])
    rewards[-1:] += score
    return rewards


def discounted_returns(rewards: np.ndarray, *, discount: float) -> np.ndarray:  # [N] float64
    """Of each token, its reward and the discounted ones after it."""
    if discount == 1.0:
        return rewards[::-1].cumsum()[::-1]

    def with_earlier(later: float, reward: float) -> float:
        return reward + discount * later

    backwards: list[float] = rewards[::-1].tolist()
    later = accumulate(backwards, with_earlier)
    return np.fromiter(later, np.float64, len(rewards))[::-1]


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    discount: float,
    decay: float,
    last_value: float = 0.0,
) -> np.ndarray:  # [N] float64
    """Generalized advantage estimation: discounted sums, by discount * decay, of the surprises
    reward + discount * next value - value.

    `values` [N] are what a critic expected before each token; `last_value` after the last one, 0
    where the episode ended there. With decay = 1 these are returns minus values. A critic learns
    towards advantages + values.
    """
    following = np.append(values[1:], last_value)
    surprises = rewards + discount * following - values
    return discounted_returns(surprises, discount=discount * decay)
