"""Surrogate objectives: what is maximised for one token, given its ratio and its advantage.

r = exp(log_ratio), A = advantage, sg = stop-gradient, log pi = the token's logprob.
At r = 1 every surrogate has the gradient of A log pi. N = trained tokens of a microbatch.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from millrace.core.plugins import plugin
from millrace.training.losses.loss import AtLeastOne, NonNegative, Positive, UnitInterval
from millrace.training.losses.weights import PolicyRatio

if TYPE_CHECKING:
    from torch import Tensor


class Surrogate(Protocol):
    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The objective [N], and named per-token metrics [N], including clip_ratio."""
        ...


@plugin
class Clip:
    """PPO's clipped surrogate (arXiv 1707.06347): min(r A, clip(r, 1 - low, 1 + high) A).

    It leaves r unbounded above where A < 0. `dual` bounds the objective by dual * A there, so the
    token has no gradient beyond it (dual clip, arXiv 1912.09729). `max_ratio` truncates the weight
    instead: beyond it the token keeps a gradient, with weight max_ratio instead of r.
    """

    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip range, above 0 and at most 1: the ratio is clipped at 1 - low."""
    high: Positive = 0.28
    """Upper clip range, above 0: the ratio is clipped at 1 + high; inf = no upper bound. DAPO
    (arXiv 2503.14476) sets it higher than low."""
    dual: Positive = math.inf
    """Ratio beyond which a token with A < 0 has no gradient (dual clip), at least 1 + high; inf
    disables it."""
    max_ratio: Positive = math.inf
    """Largest importance ratio of a token with A < 0, at least 1 + high: larger ones are truncated,
    and their tokens keep a gradient; inf disables it."""
    entropy_exponent: NonNegative = 0.0
    """Exponent of the entropy factor of clip ranges, at least 0: the range of a token is multiplied
    by (its entropy / mean entropy of its sequence) to this power, bounded to 1/4 and 4, so that
    tokens that the policy is sure of move less; 0 = no factor."""

    def __post_init__(self) -> None:
        for name, bound in (("dual", self.dual), ("max_ratio", self.max_ratio)):
            if math.isfinite(bound) and math.isinf(self.high):
                raise ValueError(
                    f"{name} = {bound} bounds the clipped ratio, but high = inf disables the clip;"
                    f" set high, or set {name} to inf"
                )
            if not bound >= 1 + self.high:
                raise ValueError(f"{name} = {bound} must be at least 1 + high")
        if math.isfinite(self.dual) and math.isfinite(self.max_ratio):
            raise ValueError(
                f"dual = {self.dual} and max_ratio = {self.max_ratio} bound the same side; set one"
                " of them to inf"
            )

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        log_ratio, advantages = policy.log_ratio, policy.advantages
        lowest, highest = self._bounds(policy)
        # Value: weight. Gradient: weight times that of the log ratio, also where it was truncated.
        weight = log_ratio.detach().clamp(max=math.log(self.max_ratio)).exp()
        ratio = weight * (log_ratio - log_ratio.detach()).exp()
        clipped = log_ratio.clamp(lowest, highest).exp()
        objective = (ratio * advantages).minimum(clipped * advantages)
        is_good, is_bad = advantages > 0, advantages < 0
        has_no_gradient = (is_good & (log_ratio > highest)) | (is_bad & (log_ratio < lowest))
        if math.isfinite(self.dual):
            beyond_dual = is_bad & (log_ratio > math.log(self.dual))
            objective = (self.dual * advantages).where(beyond_dual, objective)
            has_no_gradient |= beyond_dual
        metrics = {"clip_ratio": has_no_gradient.float()}
        if math.isfinite(self.max_ratio):
            is_truncated = is_bad & (log_ratio > math.log(self.max_ratio))
            metrics["truncation_ratio"] = is_truncated.float()
        return objective, metrics

    def _bounds(self, policy: PolicyRatio) -> tuple[Any, Any]:
        """The bounds of the log ratio: two numbers, or two for each token ([N] each)."""
        if self.entropy_exponent == 0:
            return math.log(1 - self.low) if self.low < 1 else -math.inf, math.log(1 + self.high)
        entropies, sequences = policy.tokens.entropies.detach(), policy.tokens.sequences
        relative = entropies / sequences.mean(entropies).clamp(min=1e-6)
        scale = relative.pow(self.entropy_exponent).clamp(0.25, 4.0)
        return (1 - self.low * scale).clamp(min=0).log(), (1 + self.high * scale).log()


@plugin
class Reinforce:
    """REINFORCE with importance weights: sg(w) A log pi, w = clip(r, floor, cap), or 0 outside.

    With a cap this is CISPO (MiniMax-M1, arXiv 2506.13585), and truncated importance sampling
    (TIS). With outside = "zero" it has the mask of IcePop (Ring-1T, arXiv 2510.18855).
    """

    floor: UnitInterval = 0.0
    """Smallest importance weight of a token, from 0 to 1; the key outside says what happens
    below."""
    cap: AtLeastOne = math.inf
    """Largest importance weight of a token, at least 1; the key outside says what happens above;
    inf disables it."""
    outside: Literal["truncate", "zero"] = "truncate"
    """Weight of tokens whose importance weight is below floor or above cap: "truncate" = the bound;
    "zero" masks them."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        ratio = policy.log_ratio.detach().exp()
        is_outside = (ratio < self.floor) | (ratio > self.cap)
        if self.outside == "zero":
            weight = ratio.masked_fill(is_outside, 0.0)
        else:
            weight = ratio.clamp(self.floor, self.cap)
        return weight * policy.advantages * policy.logprobs, {"clip_ratio": is_outside.float()}


@plugin
class Topr:
    """Tapered off-policy REINFORCE (arXiv 2503.14286): A log pi for good tokens, else
    sg(min(r, cap)) A log pi. Good tokens have full weight however unlikely they have become; bad
    ones only as far as they are still likely."""

    cap: Positive = 1.0
    """Largest importance weight of tokens that are not good by the key good_by, above 0."""
    good_by: Literal["advantage", "score"] = "advantage"
    """Criterion of good tokens, whose importance weight is 1: "advantage" = A > 0; "score" = the
    score of the episode is above 0, even where A < 0, as in ROLL's TOPR."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        ratio = policy.log_ratio.detach().exp()
        decisive = policy.tokens.scores if self.good_by == "score" else policy.advantages
        assert decisive is not None, "batches of such a loss are packed with scores=True"
        is_good = decisive > 0
        weight = ratio.clamp(max=self.cap).masked_fill(is_good, 1.0)
        is_capped = ~is_good & (ratio > self.cap)
        return weight * policy.advantages * policy.logprobs, {"clip_ratio": is_capped.float()}


@plugin
class Kimi:
    """Policy mirror descent (Kimi k1.5, arXiv 2501.12599): A log pi - tau / 2 (log r)^2."""

    tau: NonNegative = 0.1
    """Coefficient of the squared log ratio, which holds the policy near its anchor, at least 0."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        penalty = self.tau / 2 * policy.log_ratio.square()
        return policy.advantages * policy.logprobs - penalty, _nothing_clipped(policy)


@plugin
class Sapo:
    """Soft adaptive policy optimization (arXiv 2511.20347): 4 / t sigmoid(t (r - 1)) A. The
    gradient fades as r leaves 1, faster at a higher temperature t."""

    good_temperature: Positive = 1.0
    """Temperature of the gate of tokens with A > 0, above 0: the higher, the sooner their gradient
    fades as the ratio leaves 1."""
    bad_temperature: Positive = 1.05
    """Temperature of the gate of tokens with A <= 0, above 0: the higher, the sooner their gradient
    fades as the ratio leaves 1."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        advantages = policy.advantages
        temperature = advantages.new_full((), self.bad_temperature).expand_as(advantages)
        temperature = temperature.masked_fill(advantages > 0, self.good_temperature)
        gate = (temperature * (policy.log_ratio.exp() - 1)).sigmoid() * 4 / temperature
        return gate * advantages, _nothing_clipped(policy)


@plugin
class PrimeRl:
    """The default loss of prime-rl: keep r A - tau (log r)^2, with keep = 0 where the token's
    probability has already moved by more than max_difference in the direction of A, else 1."""

    max_difference: Positive = 0.2
    """Largest change of a token's probability in the direction of A, above 0; tokens that have
    moved further are masked."""
    tau: NonNegative = 1e-3
    """Coefficient of the squared log ratio, which holds the policy near its anchor, at least 0."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        log_ratio, advantages = policy.log_ratio, policy.advantages
        moved = policy.logprobs.detach().exp() - policy.anchor.exp()
        is_good = advantages > 0
        is_far = (is_good & (moved > self.max_difference)) | (
            ~is_good & (moved < -self.max_difference)
        )
        gain = (log_ratio.exp() * advantages).masked_fill(is_far, 0.0)
        return gain - self.tau * log_ratio.square(), {"clip_ratio": is_far.float()}


@plugin
class Vespo:
    """Variational sequence-level soft policy optimization (arXiv 2602.10693):
    sg(r^k exp(lambda (1 - r))) A log pi. The weight is 1 at r = 1 and fades on both sides of it."""

    good_power: NonNegative = 2.0
    """Exponent of the importance ratio in the weight of tokens with A > 0, at least 0."""
    good_decay: NonNegative = 3.0
    """Decay rate of the weight of tokens with A > 0 as their ratio grows, at least 0."""
    bad_power: NonNegative = 3.0
    """Exponent of the importance ratio in the weight of tokens with A <= 0, at least 0."""
    bad_decay: NonNegative = 2.0
    """Decay rate of the weight of tokens with A <= 0 as their ratio grows, at least 0."""

    def __call__(self, policy: PolicyRatio) -> "tuple[Tensor, Mapping[str, Tensor]]":
        log_ratio, advantages = policy.log_ratio.detach(), policy.advantages
        less = 1 - log_ratio.exp()
        good = self.good_power * log_ratio + self.good_decay * less
        bad = self.bad_power * log_ratio + self.bad_decay * less
        weight = good.where(advantages > 0, bad).exp()
        return weight * advantages * policy.logprobs, _nothing_clipped(policy)


def _nothing_clipped(policy: PolicyRatio) -> "dict[str, Tensor]":
    return {"clip_ratio": policy.advantages.new_zeros(len(policy.advantages))}


SURROGATES: Mapping[str, type] = {
    "clip": Clip,
    "reinforce": Reinforce,
    "topr": Topr,
    "kimi": Kimi,
    "sapo": Sapo,
    "prime_rl": PrimeRl,
    "vespo": Vespo,
}
