"""How much each token counts: corrections for who sampled it, and when.

Weights are constants for the gradient; they multiply the objective of a token, and a zero masks it.
N = trained tokens of one microbatch.

What a batch's loss is a mean of.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import above, at_least, one_of, within
from millrace.training.losses.loss import Aggregation, TokenBatch, aggregate
from millrace.training.losses.ratios import Level, pooled

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["none", "truncate", "mask", "reject"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """For tokens that another policy sampled than the anchor: w = anchor / engine.

    "truncate" weighs by w kept within the bounds, "mask" by w within them and by 0 outside,
    "reject" by 1 within and 0 outside. With anchor = "engine" w would be 1; there "mask" and
    "reject" look at what the trainer says now against the engine, and "truncate" is refused.
    """

    correction: Kind = "none"
    correction_level: Level = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0

    def __post_init__(self) -> None:
        one_of("correction", self.correction, get_args(Kind))
        one_of("correction_level", self.correction_level, get_args(Level))
        within("correction_low", self.correction_low, low=0, high=1)
        at_least("correction_high", self.correction_high, 1)

    def weights(self, tokens: TokenBatch, *, target: "Tensor") -> "Tensor | None":  # [N]
        """`target` [N] are the logprobs to correct to; None = all weigh 1."""
        if self.correction == "none":
            return None
        log_ratio = target - tokens.engine_logprobs
        ratio = pooled(log_ratio, tokens, level=self.correction_level).exp()
        if self.correction == "truncate":
            return ratio.clamp(self.correction_low, self.correction_high)
        is_inside = (ratio >= self.correction_low) & (ratio <= self.correction_high)
        return ratio * is_inside if self.correction == "mask" else is_inside.to(ratio.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessWeight:
    max_token_staleness: float = math.inf
    """Tokens staler than this are masked ..."""
    staleness_half_life: float = 0.0
    """... or, above 0, weigh half as much for each so many versions beyond it."""

    def __post_init__(self) -> None:
        at_least("max_token_staleness", self.max_token_staleness, 0)
        at_least("staleness_half_life", self.staleness_half_life, 0)
        if self.staleness_half_life > 0 and math.isinf(self.max_token_staleness):
            raise ValueError(
                f"staleness_half_life = {self.staleness_half_life} never begins to count; set"
                " max_token_staleness to where it shall"
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
    """Tokens with A < 0 are masked where the mean over their sequence of engine - trainer logprob
    exceeds this: what the policy no longer does needs no punishing."""

    def __post_init__(self) -> None:
        above("off_policy_limit", self.off_policy_limit, 0)

    def weights(self, tokens: TokenBatch) -> "Tensor | None":  # [N]
        if math.isinf(self.off_policy_limit):
            return None
        drift = tokens.sequences.mean(tokens.engine_logprobs - tokens.trainer_logprobs.detach())
        keeps = (tokens.advantages >= 0) | (drift <= self.off_policy_limit)
        return keeps.to(tokens.advantages.dtype)


if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAverage:
    aggregation: Aggregation = "token"
    """"token": every token weighs the same. "sequence": every sequence does. "constant": every
    sequence counts as one of `length` tokens."""
    length: int | None = None
    """Of "constant"; by default sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, get_args(Aggregation))
        if self.aggregation == "constant":
            if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
                raise ValueError(f"length = {self.length!r} must be a whole number, at least 1")
        elif self.length is not None:
            raise ValueError(
                f"length = {self.length} divides only what aggregation = 'constant' adds up, not"
                f" {self.aggregation!r}; leave it out"
            )

    def __call__(self, values: "Tensor", tokens: TokenBatch) -> "Tensor":
        return aggregate(values, tokens, by=self.aggregation, length=self.length)
