"""What is made of a ratio and an advantage: the objective of one token, which is maximised.

r = exp(log_ratio), A = advantage, sg = constant for the gradient, log pi = the token's logprob.
Where r is 1, every shape here has the gradient of A log pi.
N = trained tokens of one microbatch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from millrace.training.losses.checks import above, at_least, one_of, within
from millrace.training.losses.ratios import Compared

if TYPE_CHECKING:
    from torch import Tensor


class Shape(Protocol):
    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Objective [N], and named per-token metrics [N]; clipped_share is among them."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """min(r A, clip(r, 1 - low, 1 + high) A).

    Where A < 0, that leaves r unbounded above. `dual` bounds the objective by dual * A there:
    beyond it the token teaches nothing. `max_ratio` bounds the weight instead: beyond it the token
    still learns, with weight max_ratio instead of r.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = math.inf
    max_ratio: float = math.inf

    def __post_init__(self) -> None:
        above("low", self.low, 0)
        within("low", self.low, low=0, high=1)
        above("high", self.high, 0)
        for name, bound in (("dual", self.dual), ("max_ratio", self.max_ratio)):
            if math.isfinite(bound) and math.isinf(self.high):
                raise ValueError(
                    f"{name} = {bound} bounds what the clip lets through, but high = inf clips"
                    f" nothing; set high, or {name} to inf"
                )
            if not bound >= 1 + self.high:
                raise ValueError(f"{name} = {bound} must be at least 1 + high")
        if math.isfinite(self.dual) and math.isfinite(self.max_ratio):
            raise ValueError(
                f"dual = {self.dual} and max_ratio = {self.max_ratio} bound the same side; set one"
                " of them to inf"
            )

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        log_ratio, advantages = policy.log_ratio, policy.advantages
        lowest = math.log(1 - self.low) if self.low < 1 else -math.inf
        highest = math.log(1 + self.high)
        # Value: weight. Gradient: weight times that of the log ratio, also where it was truncated.
        weight = log_ratio.detach().clamp(max=math.log(self.max_ratio)).exp()
        ratio = weight * (log_ratio - log_ratio.detach()).exp()
        clipped = log_ratio.clamp(lowest, highest).exp()
        objective = (ratio * advantages).minimum(clipped * advantages)
        is_good, is_bad = advantages > 0, advantages < 0
        has_no_gradient = (is_good & (log_ratio > highest)) | (is_bad & (log_ratio < lowest))
        if math.isfinite(self.dual):
            too_bad = is_bad & (log_ratio > math.log(self.dual))
            objective = (self.dual * advantages).where(too_bad, objective)
            has_no_gradient |= too_bad
        metrics = {"clip_ratio": has_no_gradient.float()}
        if math.isfinite(self.max_ratio):
            too_heavy = is_bad & (log_ratio > math.log(self.max_ratio))
            metrics["truncation_ratio"] = too_heavy.float()
        return objective, metrics


Outside = Literal["truncate", "zero"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinforce:
    """sg(w) A log pi, with w = r kept within floor and cap; or zero outside of them."""

    floor: float = 0.0
    cap: float = math.inf
    outside: Outside = "truncate"

    def __post_init__(self) -> None:
        within("floor", self.floor, low=0, high=1)
        at_least("cap", self.cap, 1)
        one_of("outside", self.outside, get_args(Outside))

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        ratio = policy.log_ratio.detach().exp()
        is_outside = (ratio < self.floor) | (ratio > self.cap)
        if self.outside == "zero":
            weight = ratio.masked_fill(is_outside, 0.0)
        else:
            weight = ratio.clamp(self.floor, self.cap)
        return weight * policy.advantages * policy.logprobs, {"clip_ratio": is_outside.float()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Topr:
    """A log pi where A > 0; sg(min(r, cap)) A log pi elsewhere: what is good is imitated however
    unlikely it has become, what is bad only avoided as far as it is still likely."""

    cap: float = 1.0

    def __post_init__(self) -> None:
        above("cap", self.cap, 0)

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        ratio = policy.log_ratio.detach().exp()
        is_good = policy.advantages > 0
        weight = ratio.clamp(max=self.cap).masked_fill(is_good, 1.0)
        is_capped = ~is_good & (ratio > self.cap)
        return weight * policy.advantages * policy.logprobs, {"clip_ratio": is_capped.float()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kimi:
    """A log pi - tau / 2 (log r)^2."""

    tau: float = 0.1

    def __post_init__(self) -> None:
        at_least("tau", self.tau, 0)

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        pull = self.tau / 2 * policy.log_ratio.square()
        objective = policy.advantages * policy.logprobs - pull
        return objective, _nothing_clipped(policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sapo:
    """4 / t sigmoid(t (r - 1)) A: the gradient fades as r leaves 1, the faster the higher the
    temperature t, which has one value for A > 0 and one for the rest."""

    good_temperature: float = 1.0
    bad_temperature: float = 1.05

    def __post_init__(self) -> None:
        above("good_temperature", self.good_temperature, 0)
        above("bad_temperature", self.bad_temperature, 0)

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        advantages = policy.advantages
        temperature = advantages.new_full((), self.bad_temperature).expand_as(advantages)
        temperature = temperature.masked_fill(advantages > 0, self.good_temperature)
        gate = (temperature * (policy.log_ratio.exp() - 1)).sigmoid() * 4 / temperature
        return gate * advantages, _nothing_clipped(policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrimeRl:
    """keep r A - tau (log r)^2; keep is 0 where the token's probability has already moved by more
    than max_difference to where A pushes it, else 1."""

    max_difference: float = 0.2
    tau: float = 1e-3

    def __post_init__(self) -> None:
        above("max_difference", self.max_difference, 0)
        at_least("tau", self.tau, 0)

    def __call__(self, policy: Compared) -> "tuple[Tensor, Mapping[str, Tensor]]":
        log_ratio, advantages = policy.log_ratio, policy.advantages
        moved = policy.logprobs.detach().exp() - policy.anchor.exp()
        is_good = advantages > 0
        is_far = (is_good & (moved > self.max_difference)) | (
            ~is_good & (moved < -self.max_difference)
        )
        gain = (log_ratio.exp() * advantages).masked_fill(is_far, 0.0)
        objective = gain - self.tau * log_ratio.square()
        return objective, {"clip_ratio": is_far.float()}


def _nothing_clipped(policy: Compared) -> "dict[str, Tensor]":
    return {"clip_ratio": policy.advantages.new_zeros(len(policy.advantages))}


SHAPES: Mapping[str, type] = {
    "clip": Clip,
    "reinforce": Reinforce,
    "topr": Topr,
    "kimi": Kimi,
    "sapo": Sapo,
    "prime_rl": PrimeRl,
}
