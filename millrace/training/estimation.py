"""From rewards and values to advantages and returns, for the critic.

Promise: what is normalised is normalised over all trained tokens of a step, however it is packed.
N = trained tokens of a microbatch, R = its rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.returns import gae

_EPSILON = 1e-4  # a smaller deviation is taken for noise, and not blown up


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimation:
    """Generalized advantage estimation."""

    discount: float = 1.0
    decay: float = 1.0
    normalize: bool = True  # advantages, over a step

    def estimate(
        self, part: Microbatch, *, values: np.ndarray, last_values: np.ndarray
    ) -> Microbatch:
        """The microbatch with advantages and returns, given the values before its trained tokens
        [N] and after the last one of each rollout [R]."""
        assert part.rewards is not None, "batches for a critic are packed for one"
        ends = np.cumsum(np.bincount(part.rollouts))[:-1]
        rollouts = zip(
            np.split(part.rewards.astype(np.float64), ends),
            np.split(values.astype(np.float64), ends),
            last_values.tolist(),
            strict=True,
        )
        found = [
            gae(rewards, expected, discount=self.discount, decay=self.decay, last_value=last)
            for rewards, expected, last in rollouts
        ]
        advantages = np.concatenate(found)
        return replace(
            part,
            advantages=advantages.astype(np.float32),
            values=values,
            returns=(advantages + values).astype(np.float32),
        )

    def settle(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The batches of a step, all of them estimated: normalised, if they shall be."""
        if not self.normalize:
            return tuple(batches)
        advantages = _of_step(batches, "advantages")
        mean, deviation = advantages.mean(), advantages.std() + _EPSILON

        def normalized(part: Microbatch) -> Microbatch:
            values = (part.advantages - mean) / deviation
            return replace(part, advantages=values.astype(np.float32))

        return tuple(
            replace(batch, microbatches=tuple(map(normalized, batch.microbatches)))
            for batch in batches
        )


def judgement_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Of the batches of a step, all of them estimated."""
    values, returns = _of_step(batches, "values"), _of_step(batches, "returns")
    # 1 = the critic knew; 0 = it knew no better than one number for all. Where all returns are
    # equal there is nothing to explain.
    spread = float(returns.var())
    is_spread = spread > _EPSILON**2
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": 1 - float((returns - values).var()) / spread if is_spread else 0.0,
    }


def _of_step(batches: Sequence[Batch], name: str) -> np.ndarray:  # [trained tokens] float64
    parts = [getattr(m, name) for batch in batches for m in batch.microbatches]
    return np.concatenate(parts, dtype=np.float64)
