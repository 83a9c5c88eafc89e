"""Regularisers of a policy loss, each averaged in its own way: reference KL and entropy bonus.

N = trained tokens of a microbatch.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, get_args

from millrace.core.errors import RunFailed
from millrace.training.losses.checks import above, at_least, is_switch, one_of
from millrace.training.losses.loss import TokenBatch
from millrace.training.losses.weights import LossAverage

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Denominator = Literal["policy", "token", "sequence"]


def kl_estimate(
    logprobs: "Tensor", reference: "Tensor", *, estimator: Estimator
) -> "Tensor":  # [N]
    """Schulman's estimators of KL(policy || reference), from tokens that the policy sampled.

    With d = reference - policy logprob: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. As a term of a
    loss, k2 has the gradient of that divergence, k3 that of the opposite one, and k1 none on
    average.
    """
    difference = reference - logprobs
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return difference.exp() - 1 - difference


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceKl:
    """KL penalty towards a reference model."""

    kl: float = 0.0
    """KL coefficient (beta of GRPO), at least 0; 0 = off. Above 0 the run needs a reference
    model."""
    kl_estimator: Estimator = "k3"
    """KL estimator: "k1", "k2" or "k3" (Schulman 2020)."""
    kl_weighted: bool = False
    """Whether each token's KL is weighted by its importance ratio, which makes it unbiased
    off-policy (DeepSeek-V3.2)."""
    kl_aggregation: Denominator = "policy"
    """Average of the KL term: "token", "sequence", or "policy" = as the policy's own term."""

    def __post_init__(self) -> None:
        at_least("kl", self.kl, 0)
        one_of("kl_estimator", self.kl_estimator, get_args(Estimator))
        is_switch("kl_weighted", self.kl_weighted)
        one_of("kl_aggregation", self.kl_aggregation, get_args(Denominator))

    def per_token(self, tokens: TokenBatch, *, log_ratio: "Tensor") -> "Tensor":  # [N]
        """Without the coefficient; `log_ratio` [N] is the policy's against its anchor."""
        if tokens.reference_logprobs is None:
            raise RunFailed(
                f"loss.kl = {self.kl} needs a reference model, but the batch has no reference"
                " logprobs; add a [[scorers]] of type 'reference'."
            )
        estimate = kl_estimate(
            tokens.trainer_logprobs, tokens.reference_logprobs, estimator=self.kl_estimator
        )
        return estimate * log_ratio.exp() if self.kl_weighted else estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """Entropy bonus, with a fixed or an adaptive coefficient (Skywork-OR1, 2025)."""

    entropy_bonus: float = 0.0
    """Entropy coefficient, at least 0; with entropy_target, its first value."""
    entropy_target: float = 0.0
    """Target entropy in nats per token; 0 = the coefficient is fixed. Otherwise the coefficient
    grows after each step with less entropy and shrinks after each step with more."""
    entropy_bonus_step: float = 1e-3
    """Change of an adaptive coefficient per step, above 0."""
    entropy_bonus_max: float = 0.05
    """Largest value of an adaptive coefficient; the smallest is 0."""
    entropy_aggregation: Denominator = "token"
    """Average of the entropy: "token", "sequence", or "policy" = as the policy's own term."""

    def __post_init__(self) -> None:
        at_least("entropy_bonus", self.entropy_bonus, 0)
        at_least("entropy_target", self.entropy_target, 0)
        above("entropy_bonus_step", self.entropy_bonus_step, 0)
        if self.is_adaptive and not self.entropy_bonus <= self.entropy_bonus_max:
            raise ValueError(
                f"entropy_bonus = {self.entropy_bonus} is above entropy_bonus_max ="
                f" {self.entropy_bonus_max}; raise entropy_bonus_max"
            )
        one_of("entropy_aggregation", self.entropy_aggregation, get_args(Denominator))

    @property
    def is_adaptive(self) -> bool:
        return self.entropy_target > 0

    def adapted(self, *, entropy: float) -> Self:
        """The bonus of the next step, after one with this mean entropy."""
        if not self.is_adaptive:
            return self
        change = self.entropy_bonus_step * (1 if entropy < self.entropy_target else -1)
        bonus = min(max(0.0, self.entropy_bonus + change), self.entropy_bonus_max)
        return dataclasses.replace(self, entropy_bonus=bonus)


def own_average(denominator: Denominator, *, policy: LossAverage) -> LossAverage:
    """The average of a regulariser beside a policy term with its own average."""
    return policy if denominator == "policy" else LossAverage(aggregation=denominator)
