"""Objectives: what a trainer minimises, token by token.

A loss is a frozen dataclass whose fields are its TOML keys. It is called once per microbatch with
the tokens trained there, and must divide by the totals of the whole batch: then the gradients of
the microbatches add up to the gradient of the batch, however it was split.

Imports torch for types only: the settings of a loss are checked before any process loads torch.

N = trained tokens of one microbatch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """The trained tokens of one microbatch, and the totals of the batch it belongs to."""

    trainer_logprobs: "Tensor"  # [N] float32; differentiable
    engine_logprobs: "Tensor"  # [N] float32; of the policy that sampled the token
    entropies: "Tensor"  # [N] float32; differentiable
    advantages: "Tensor"  # [N] float32
    staleness: "Tensor"  # [N] int64; trainer Version minus the token's Version
    sequence_ids: "Tensor"  # [N] int64; tokens of one sequence share one, and lie in one microbatch
    num_trained_tokens: int  # of the whole batch
    num_sequences: int  # of the whole batch


class Loss(Protocol):
    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The microbatch's share of the batch's loss, and named per-token metrics [N].

        The trainer averages each metric over all trained tokens of the batch.
        """
        ...


Aggregation = Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedLoss:
    """Clipped policy gradient with the engine as behaviour policy.

    With r = exp(trainer - engine logprob) and advantage A, a token's objective is
    min(r A, clip(r, 1 - low, 1 + high) A). Where that leaves r unbounded (A < 0 and r large) its
    weight is truncated at max_ratio: the token still learns, with weight max_ratio instead of r.
    """

    low: float = 0.2
    high: float = 0.28
    max_ratio: float = 2.0
    aggregation: Aggregation = "token"

    def __post_init__(self) -> None:
        if not 0 < self.low < 1:
            raise ValueError(f"low = {self.low} must lie between 0 and 1")
        if not self.high > 0:
            raise ValueError(f"high = {self.high} must be above 0")
        if not self.max_ratio >= 1 + self.high:
            raise ValueError(f"max_ratio = {self.max_ratio} must be at least 1 + high")
        if self.aggregation not in ("token", "sequence"):
            raise ValueError(f"aggregation = {self.aggregation!r} must be 'token' or 'sequence'")

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        logprobs, advantages = tokens.trainer_logprobs, tokens.advantages
        # The logarithm is bounded, not the ratio, so that nothing overflows before it is bounded.
        log_ratio = logprobs - tokens.engine_logprobs
        weight = log_ratio.detach().clamp(max=math.log(self.max_ratio)).exp()
        # Value: weight. Gradient: weight times that of the logprob, also where it was truncated.
        ratio = weight * (logprobs - logprobs.detach()).exp()
        clipped = log_ratio.clamp(math.log(1 - self.low), math.log(1 + self.high)).exp()
        objective = (ratio * advantages).minimum(clipped * advantages)
        too_high = (advantages > 0) & (log_ratio > math.log(1 + self.high))
        too_low = (advantages < 0) & (log_ratio < math.log(1 - self.low))
        truncated = (advantages < 0) & (log_ratio > math.log(self.max_ratio))
        metrics = {
            "clipped_share": (too_high | too_low).float(),
            "truncated_share": truncated.float(),
        }
        return -aggregate(objective, tokens, by=self.aggregation), metrics


def aggregate(values: "Tensor", tokens: TokenBatch, *, by: Aggregation) -> "Tensor":
    """This microbatch's share of the batch's mean of per-token values [N].

    "token": every token of the batch weighs the same. "sequence": every sequence weighs the same,
    and its tokens share that equally.
    """
    if by == "token":
        return values.sum() / tokens.num_trained_tokens
    lengths = tokens.sequence_ids.bincount()[tokens.sequence_ids]  # [N]
    return (values / lengths).sum() / tokens.num_sequences


LOSSES: Mapping[str, type] = {"clipped": ClippedLoss}
