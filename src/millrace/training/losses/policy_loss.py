"""The policy-gradient loss: a ratio, a surrogate, token weights, an average and regularisers.

    loss = -average(weight * surrogate(ratio, advantage))
           + distil_weight * divergence + kl * KL - entropy_bonus * entropy

Promise: a microbatch gives its share of the batch's loss, and a token of weight 0 has no gradient
except that of the regularisers. docs/reference/losses.md has the formulas of all parts.

Distillation is a term of the advantages, or a divergence that is minimised. With p the teacher's
distribution and q the policy's, over the teacher's most likely ids and, as one more outcome, all
other ids together:

    reverse_kl    log p - log q of the sampled token, as a constant, is added to its advantage, so
                  that its policy gradient is that of KL(q, p) (on-policy distillation)
    forward_kl    KL(p, q)
    jsd           beta KL(p, m) + (1 - beta) KL(q, m), with m = beta p + (1 - beta) q
                  (generalized JSD, arXiv 2306.13649)

The latter two have gradients of their own and need no ratio. Tokens without a teacher count 0.
N = trained tokens of a microbatch.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from millrace.core.errors import RunFailed
from millrace.core.plugins import plugin
from millrace.training.losses.loss import NonNegative, Positive, TokenBatch, TopK
from millrace.training.losses.surrogates import Clip, Surrogate
from millrace.training.losses.weights import (
    LOG_BOUND,
    Correction,
    Denominator,
    LossAverage,
    OffPolicyMask,
    Ratio,
    SecondMomentMask,
    StalenessWeight,
    VarianceControl,
)

if TYPE_CHECKING:
    from torch import Tensor


@plugin
class Distillation:
    distil: Literal["none", "reverse_kl", "forward_kl", "jsd"] = "none"
    """Divergence from the teacher that the loss reduces. By default the key loss of the teacher's
    [[scorers]] table decides, and without a teacher it is "none"."""
    distil_weight: NonNegative = 1.0
    """Coefficient of the divergence from the teacher, at least 0."""
    distil_beta: Annotated[float, Field(ge=0.001, le=0.999)] = 0.5
    """Interpolation of distil = "jsd", from 0.001 to 0.999: near 0 it is proportional to
    forward_kl, near 1 to reverse_kl."""
    reward_weight: NonNegative = 1.0
    """Coefficient of the advantages from rewards beside a teacher, at least 0; 0 = learn from the
    teacher alone."""

    @property
    def is_on(self) -> bool:
        return self.distil != "none"

    @property
    def needs_topk(self) -> bool:
        return self.distil in ("forward_kl", "jsd")

    def with_advantages(self, tokens: TokenBatch) -> TokenBatch:
        """The tokens with the advantages that the policy gradient uses."""
        advantages = self.reward_weight * tokens.advantages
        if self.distil == "reverse_kl":
            advantages = advantages - self.distil_weight * self.sampled_kl(tokens)
        return dataclasses.replace(tokens, advantages=advantages)

    def divergence(self, tokens: TokenBatch) -> "Tensor":  # [N]
        """forward_kl or jsd at each token, without the coefficient; 0 without a teacher."""
        if tokens.topk is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        has_teacher = ~tokens.topk.teacher[:, :1].isnan()
        teacher = tokens.topk.teacher.where(has_teacher, tokens.topk.trainer.detach())
        topk = TopK(teacher=teacher, trainer=tokens.topk.trainer)
        values = forward_kl(topk) if self.distil == "forward_kl" else jsd(topk, self.distil_beta)
        return values * has_teacher[:, 0]

    def sampled_kl(self, tokens: TokenBatch) -> "Tensor":  # [N] constant
        """log q - log p of the sampled tokens, an estimate of KL(q, p); 0 without a teacher."""
        if tokens.teacher_logprobs is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        difference = tokens.trainer_logprobs.detach() - tokens.teacher_logprobs
        return difference.clamp(-LOG_BOUND, LOG_BOUND).nan_to_num(nan=0.0)


def forward_kl(topk: TopK) -> "Tensor":  # [N]
    return (topk.teacher.exp() * (topk.teacher - topk.trainer)).sum(-1)


def jsd(topk: TopK, beta: float) -> "Tensor":  # [N]
    p, q = topk.teacher, topk.trainer
    mixed = (p + math.log(beta)).logaddexp(q + math.log1p(-beta))
    from_teacher = (p.exp() * (p - mixed)).sum(-1)
    from_policy = (q.exp() * (q - mixed)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_policy


@plugin
class ReferenceKl:
    kl: NonNegative = 0.0
    """KL coefficient (beta of GRPO), at least 0; 0 = off. Above 0 the run needs a reference
    model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator: "k1", "k2" or "k3" (Schulman 2020)."""
    kl_weighted: bool = False
    """Weighting of the KL of each token by its importance ratio, which makes the KL unbiased
    off-policy (DeepSeek-V3.2, arXiv 2512.02556)."""
    kl_aggregation: Denominator = "policy"
    """Average of the KL term over a batch: "token", "sequence" (as in aggregation), or "policy" =
    as the key aggregation says."""

    def per_token(self, tokens: TokenBatch, *, log_ratio: "Tensor") -> "Tensor":  # [N]
        """Estimates of KL(policy || reference), from tokens that the policy sampled, without the
        coefficient. As a term of a loss, k2 has the gradient of that divergence, k3 that of the
        opposite one, and k1 none on average. `log_ratio` [N] is the policy's against its anchor."""
        if tokens.reference_logprobs is None:
            raise RunFailed(
                f"loss.kl = {self.kl} needs a reference model, but the batch has no reference"
                " logprobs; add a [[scorers]] of type 'reference'."
            )
        difference = tokens.reference_logprobs - tokens.trainer_logprobs
        match self.kl_estimator:
            case "k1":
                estimate = -difference
            case "k2":
                estimate = difference.square() / 2
            case "k3":
                estimate = difference.exp() - 1 - difference
        return estimate * log_ratio.exp() if self.kl_weighted else estimate


@plugin
class EntropyBonus:
    """Entropy bonus, with a fixed or an adaptive coefficient (Skywork-OR1, arXiv 2505.22312)."""

    entropy_bonus: NonNegative = 0.0
    """Entropy coefficient, at least 0. With entropy_target it is the coefficient of the first
    step."""
    entropy_target: NonNegative = 0.0
    """Target entropy in nats per token, at least 0: the entropy coefficient grows after each step
    with less entropy and shrinks after each step with more; 0 = the coefficient is fixed."""
    entropy_bonus_step: Positive = 1e-3
    """Change of the entropy coefficient per step, above 0, if entropy_target makes it adaptive."""
    entropy_bonus_max: NonNegative = 0.05
    """Largest entropy coefficient if entropy_target makes it adaptive; the smallest is 0."""
    entropy_aggregation: Denominator = "token"
    """Average of the entropy over a batch: "token", "sequence" (as in aggregation), or "policy" =
    as the key aggregation says."""

    def __post_init__(self) -> None:
        if self.is_adaptive and not self.entropy_bonus <= self.entropy_bonus_max:
            raise ValueError(
                f"entropy_bonus = {self.entropy_bonus} is above entropy_bonus_max ="
                f" {self.entropy_bonus_max}; raise entropy_bonus_max"
            )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """By default PPO's clip against the engine's logprobs with weights truncated at 2, averaged
    over the tokens of the batch."""

    ratio: Ratio = field(default_factory=Ratio)
    surrogate: Surrogate = field(default_factory=lambda: Clip(max_ratio=2.0))
    correction: Correction = field(default_factory=Correction)
    staleness: StalenessWeight = field(default_factory=StalenessWeight)
    off_policy: OffPolicyMask = field(default_factory=OffPolicyMask)
    second_moment: SecondMomentMask = field(default_factory=SecondMomentMask)
    variance: VarianceControl = field(default_factory=VarianceControl)
    average: LossAverage = field(default_factory=LossAverage)
    distil: Distillation = field(default_factory=Distillation)
    kl: ReferenceKl = field(default_factory=ReferenceKl)
    entropy: EntropyBonus = field(default_factory=EntropyBonus)

    def __post_init__(self) -> None:
        if self.correction.correction == "truncate" and self.ratio.anchor == "engine":
            raise ValueError(
                "correction = 'truncate' weighs the anchor against the engine, and anchor ="
                " 'engine' is the engine; set anchor to 'proximal', or correction to 'none'"
            )

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        tokens = self.distil.with_advantages(tokens)
        policy = self.ratio.compare(tokens)
        objective, surrogate_metrics = self.surrogate(policy)
        metrics = dict(surrogate_metrics)
        weights = self._weights(tokens, anchor=policy.anchor)
        if weights is not None:
            objective = objective * weights
            metrics["mask_ratio"] = (weights == 0).float()
            metrics["loss_weight/mean"] = weights
        if self.variance.ess_scaling:
            metrics |= self.variance.sample_sizes(policy.log_ratio, tokens)
        loss = -self.average(objective, tokens)
        if self.distil.is_on:
            metrics["teacher/kl"] = self.distil.sampled_kl(tokens)
        if self.distil.needs_topk:
            divergence = self.distil.divergence(tokens)
            loss = loss + self.distil.distil_weight * self.average(divergence, tokens)
            metrics["teacher/divergence"] = divergence.detach()
        if self.kl.kl > 0:
            kl = self.kl.per_token(tokens, log_ratio=policy.log_ratio)
            average = self.average.of_term(self.kl.kl_aggregation)
            loss = loss + self.kl.kl * average(kl, tokens)
            metrics["kl"] = kl.detach()
        if self.entropy.entropy_bonus > 0:
            average = self.average.of_term(self.entropy.entropy_aggregation)
            loss = loss - self.entropy.entropy_bonus * average(tokens.entropies, tokens)
        return loss, metrics

    @property
    def needs_proximal(self) -> bool:
        return self.ratio.anchor == "proximal"

    @property
    def scales_step(self) -> bool:
        return bool(self.variance.ess_scaling)

    @property
    def subtracts_baseline(self) -> bool:
        return self.variance.minimum_variance_baseline

    @property
    def needs_topk(self) -> bool:
        return self.distil.needs_topk

    @property
    def needs_reference(self) -> bool:
        return self.kl.kl > 0

    def adapted(self, metrics: Mapping[str, float]) -> Self:
        entropy = self.entropy.adapted(entropy=metrics["entropy"])
        return dataclasses.replace(self, entropy=entropy)

    def state(self) -> dict[str, float]:
        return {"entropy_bonus": self.entropy.entropy_bonus} if self.entropy.is_adaptive else {}

    def with_state(self, state: Mapping[str, float]) -> Self:
        # A run may be resumed with other loss settings, so only state that still applies is used.
        if "entropy_bonus" not in state or not self.entropy.is_adaptive:
            return self
        bonus = min(state["entropy_bonus"], self.entropy.entropy_bonus_max)
        entropy = dataclasses.replace(self.entropy, entropy_bonus=bonus)
        return dataclasses.replace(self, entropy=entropy)

    def _weights(self, tokens: TokenBatch, *, anchor: "Tensor") -> "Tensor | None":  # [N]
        is_engine = self.ratio.anchor == "engine"
        target = tokens.trainer_logprobs.detach() if is_engine else anchor
        product = self.correction.weights(tokens, target=target)
        for weights in (
            self.staleness.weights(tokens),
            self.off_policy.weights(tokens),
            self.second_moment.weights(tokens, target=target),
        ):
            if weights is not None:
                product = weights if product is None else product * weights
        return product
