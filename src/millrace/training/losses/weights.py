"""Weights of single tokens, and how a loss is averaged over a batch.

Weights are constants for the gradient. They multiply a token's objective; a weight of 0 masks it.
N = trained tokens of a microbatch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import above, at_least, one_of, within
from millrace.training.losses.loss import Aggregation, TokenBatch, aggregate
from millrace.training.losses.ratios import Level, log_ratio_at

if TYPE_CHECKING:
    from torch import Tensor

CorrectionKind = Literal["none", "truncate", "mask", "reject"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Importance sampling correction from the engine's distribution to the anchor's, with
    w = anchor / engine (the behaviour weight of decoupled PPO, Hilton et al. 2022).

    With anchor = "engine" w would be 1. So there "mask" and "reject" use the trainer's present
    logprobs instead of the anchor's, and "truncate" is refused.
    """

    correction: CorrectionKind = "none"
    """Importance sampling correction: "truncate" weighs by w within the bounds, "mask" by w inside
    of them and 0 outside, "reject" by 1 inside and 0 outside (rejection sampling)."""
    correction_level: Level = "token"
    """Level of w: "token", "turn", "sequence" or "geometric"; see ratio."""
    correction_low: float = 0.0
    """Lower bound of w, from 0 to 1."""
    correction_high: float = 2.0
    """Upper bound of w, at least 1."""

    def __post_init__(self) -> None:
        one_of("correction", self.correction, get_args(CorrectionKind))
        one_of("correction_level", self.correction_level, get_args(Level))
        within("correction_low", self.correction_low, low=0, high=1)
        at_least("correction_high", self.correction_high, 1)

    def weights(self, tokens: TokenBatch, *, target: "Tensor") -> "Tensor | None":  # [N]
        """`target` [N] are the logprobs to correct to; None = all weights are 1."""
        if self.correction == "none":
            return None
        log_ratio = target - tokens.engine_logprobs
        ratio = log_ratio_at(log_ratio, tokens, level=self.correction_level).exp()
        if self.correction == "truncate":
            return ratio.clamp(self.correction_low, self.correction_high)
        is_inside = (ratio >= self.correction_low) & (ratio <= self.correction_high)
        return ratio * is_inside if self.correction == "mask" else is_inside.to(ratio.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessWeight:
    max_token_staleness: float = math.inf
    """Largest staleness of a token with full weight, in versions; inf = no limit. Staler tokens are
    masked, or decay if staleness_half_life is above 0."""
    staleness_half_life: float = 0.0
    """Versions beyond max_token_staleness in which a token's weight halves; 0 = mask at once."""

    def __post_init__(self) -> None:
        at_least("max_token_staleness", self.max_token_staleness, 0)
        at_least("staleness_half_life", self.staleness_half_life, 0)
        if self.staleness_half_life > 0 and math.isinf(self.max_token_staleness):
            raise ValueError(
                f"staleness_half_life = {self.staleness_half_life} has no effect without a limit;"
                " set max_token_staleness to where the decay starts"
            )

    def weights(self, tokens: TokenBatch) -> "Tensor | None":  # [N]
        if math.isinf(self.max_token_staleness):
            return None
        excess = (tokens.staleness - self.max_token_staleness).clamp(min=0)
        if self.staleness_half_life == 0:
            return (excess == 0).to(tokens.advantages.dtype)
        decay = math.log(2) / self.staleness_half_life
        return (-decay * excess).exp().to(tokens.advantages.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyMask:
    off_policy_limit: float = math.inf
    """Off-policy sequence mask (DeepSeek-V3.2): tokens with A < 0 are masked if the mean of engine
    minus trainer logprob over their sequence exceeds this; above 0, inf disables it."""

    def __post_init__(self) -> None:
        above("off_policy_limit", self.off_policy_limit, 0)

    def weights(self, tokens: TokenBatch) -> "Tensor | None":  # [N]
        if math.isinf(self.off_policy_limit):
            return None
        drift = tokens.sequences.mean(tokens.engine_logprobs - tokens.trainer_logprobs.detach())
        is_kept = (tokens.advantages >= 0) | (drift <= self.off_policy_limit)
        return is_kept.to(tokens.advantages.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAverage:
    aggregation: Aggregation = "token"
    """Average of the loss over a batch: "token", the mean over tokens (DAPO); "sequence", the mean
    over sequences of the mean over their tokens (GRPO); "constant", the sum over tokens divided by
    the number of sequences times `length` (Dr. GRPO)."""
    length: int | None = None
    """Divisor of aggregation = "constant", in tokens; by default sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, get_args(Aggregation))
        if self.aggregation == "constant":
            if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
                raise ValueError(f"length = {self.length!r} must be a whole number, at least 1")
        elif self.length is not None:
            raise ValueError(
                f"length = {self.length} needs aggregation = 'constant', not"
                f" {self.aggregation!r}; leave it out"
            )

    def __call__(self, values: "Tensor", tokens: TokenBatch) -> "Tensor":
        return aggregate(values, tokens, by=self.aggregation, length=self.length)
