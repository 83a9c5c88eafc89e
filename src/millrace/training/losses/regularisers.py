"""What is added to an objective besides the policy's own term, each with its own denominator.

N = trained tokens of one microbatch.
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
    """Of KL(policy || reference), from tokens that the policy sampled.

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
    """Keeps the policy near a reference model."""

    kl: float = 0.0
    """Coefficient; 0 = off. Above 0 the run needs reference logprobs."""
    kl_estimator: Estimator = "k3"
    kl_weighted: bool = False
    """Weigh each token's by the ratio to the anchor, so that it is unbiased off-policy, too."""
    kl_aggregation: Denominator = "policy"
    """What it is a mean of; "policy" = what the policy's term is."""

    def __post_init__(self) -> None:
        at_least("kl", self.kl, 0)
        one_of("kl_estimator", self.kl_estimator, get_args(Estimator))
        is_switch("kl_weighted", self.kl_weighted)
        one_of("kl_aggregation", self.kl_aggregation, get_args(Denominator))

    def per_token(self, tokens: TokenBatch, *, log_ratio: "Tensor") -> "Tensor":  # [N]
        """Without the coefficient; `log_ratio` [N] is the policy's against its anchor."""
        if tokens.reference_logprobs is None:
            raise RunFailed(
                f"loss.kl = {self.kl} compares with a reference model, but the batch has no"
                " reference logprobs; add a [[scorers]] of type 'reference'."
            )
        estimate = kl_estimate(
            tokens.trainer_logprobs, tokens.reference_logprobs, estimator=self.kl_estimator
        )
        return estimate * log_ratio.exp() if self.kl_weighted else estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """Rewards the policy for staying undecided."""

    entropy_bonus: float = 0.0
    """Coefficient of the mean entropy; with a target, the one to begin with."""
    entropy_target: float = 0.0
    """Above 0, the coefficient grows after each step whose entropy is below this, and shrinks after
    the others."""
    entropy_bonus_step: float = 1e-3
    """By how much; it stays between 0 and entropy_bonus_max."""
    entropy_bonus_max: float = 0.05
    entropy_aggregation: Denominator = "token"

    def __post_init__(self) -> None:
        at_least("entropy_bonus", self.entropy_bonus, 0)
        at_least("entropy_target", self.entropy_target, 0)
        above("entropy_bonus_step", self.entropy_bonus_step, 0)
        if self.is_adaptive and not self.entropy_bonus <= self.entropy_bonus_max:
            raise ValueError(
                f"entropy_bonus = {self.entropy_bonus} begins above entropy_bonus_max ="
                f" {self.entropy_bonus_max}; raise that"
            )
        one_of("entropy_aggregation", self.entropy_aggregation, get_args(Denominator))

    @property
    def is_adaptive(self) -> bool:
        return self.entropy_target > 0

    def adapted(self, *, entropy: float) -> Self:
        """For the step after one whose tokens had this mean entropy."""
        if not self.is_adaptive:
            return self
        change = self.entropy_bonus_step * (1 if entropy < self.entropy_target else -1)
        bonus = min(max(0.0, self.entropy_bonus + change), self.entropy_bonus_max)
        return dataclasses.replace(self, entropy_bonus=bonus)


def own_average(denominator: Denominator, *, policy: LossAverage) -> LossAverage:
    return policy if denominator == "policy" else LossAverage(aggregation=denominator)
