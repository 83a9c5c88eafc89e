"""The policy-gradient loss: a ratio, a surrogate, token weights, an average and regularisers.

    loss = -average(weight * surrogate(ratio, advantage))
           + distil_weight * divergence + kl * KL - entropy_bonus * entropy

Promise: a microbatch gives its share of the batch's loss, and a token of weight 0 has no gradient
except that of the regularisers. docs/reference/losses.md has the formulas of all parts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from millrace.training.losses.loss import RATIO, SQUARED_RATIO, TokenBatch
from millrace.training.losses.regularisers import Distillation, EntropyBonus, ReferenceKl
from millrace.training.losses.surrogates import Clip, Surrogate
from millrace.training.losses.weights import (
    Correction,
    LossAverage,
    OffPolicyMask,
    Ratio,
    SecondMomentMask,
    StalenessWeight,
    StepScale,
)

if TYPE_CHECKING:
    from torch import Tensor


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
    step: StepScale = field(default_factory=StepScale)
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
        if self.step.ess_scaling:
            ratio = policy.log_ratio.detach().exp()
            metrics |= {RATIO: ratio, SQUARED_RATIO: ratio.square()}
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
        return self.step.ess_scaling

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
        for part in (self.staleness, self.off_policy, self.second_moment):
            weights = part.weights(tokens)
            if weights is not None:
                product = weights if product is None else product * weights
        return product
