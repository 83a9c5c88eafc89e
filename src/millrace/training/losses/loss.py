"""The interface between the trainer and a loss: its input, and what it returns.

A loss is a frozen dataclass whose fields are its TOML keys. It is called once per microbatch with
the tokens trained there, and it divides by the totals of the whole batch. So the gradients of the
microbatches, on all ranks, sum to the gradient of the batch, however the batch was split. Only the
rules "m2po" and "areal" of loss.second_moment_rule mask tokens by the others of their microbatch.

Imports torch for types only: the settings of a loss are checked before any process loads torch.

N = trained tokens of a microbatch, R = segments of them, K = ids per token that a teacher gives
logprobs for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, runtime_checkable

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

# Values of settings; infinity means no limit.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=True)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=True)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


# Per-token metrics of a loss with `scales_step`; the trainer sums them and reports none.
COUNT, RATIO, SQUARED_RATIO = SAMPLE_SIZE = "_count", "_ratio", "_squared_ratio"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenSegments:
    """A partition of the tokens of a microbatch: into sequences, turns or groups."""

    ids: "Tensor"  # [N] int64; segment of each token, 0 .. R - 1
    lengths: "Tensor"  # [R] int64; tokens in each segment

    def sum(self, values: "Tensor") -> "Tensor":
        """The sum of `values` [N] over the segment of each token, [N]."""
        sums = values.new_zeros(len(self.lengths)).index_add(0, self.ids, values)
        return sums[self.ids]

    def mean(self, values: "Tensor") -> "Tensor":
        """The mean of `values` [N] over the segment of each token, [N]."""
        return self.sum(values) / self.lengths[self.ids]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopK:
    """Logprobs of the teacher's K most likely ids at each token; the last column holds the
    probability of all other ids together."""

    teacher: "Tensor"  # [N, K + 1] float32; NaN where a token has no teacher
    trainer: "Tensor"  # [N, K + 1] float32; differentiable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """The trained tokens of one microbatch, and the totals of the batch it belongs to."""

    trainer_logprobs: "Tensor"  # [N] float32; differentiable
    engine_logprobs: "Tensor"  # [N] float32; of the policy that sampled the token
    entropies: "Tensor"  # [N] float32; differentiable
    advantages: "Tensor"  # [N] float32
    staleness: "Tensor"  # [N] int64; trainer Version minus the token's Version
    sequences: TokenSegments  # a sequence lies in one microbatch
    turns: TokenSegments  # consecutive sampled tokens of a sequence
    num_trained_tokens: int  # of the whole batch
    num_sequences: int  # of the whole batch
    proximal_logprobs: "Tensor | None" = None
    """[N] float32; the trainer's logprobs before the first update of the step. None in the first
    update, where they equal trainer_logprobs."""
    scores: "Tensor | None" = None
    """[N] float32; of the token's episode, if the loss needs it."""
    reference_logprobs: "Tensor | None" = None
    """[N] float32; of the reference model, if the run has one."""
    teacher_logprobs: "Tensor | None" = None
    """[N] float32; of a teacher, if the run has one; NaN for tokens without a teacher."""
    topk: "TopK | None" = None
    """If the loss needs it and the run has a teacher that gives more than the sampled token."""
    groups: TokenSegments | None = None
    """For losses that compare the sequences of a group, which then lie in one microbatch."""
    num_groups: int = 0  # of the whole batch


class Loss(Protocol):
    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The microbatch's share of the batch's loss, and named per-token metrics [N]. The trainer
        averages each metric over all trained tokens of the batch."""
        ...


Trait = Literal[
    "needs_proximal",  # it uses these logprobs, which cost one more forward pass
    "needs_reference",
    "needs_topk",  # another pass over the logits
    "scales_step",  # the effective sample size of its ratios scales the learning rate
    "subtracts_baseline",  # the minimum-variance baseline, from advantages before it
]


def has_trait(loss: Loss, trait: Trait) -> bool:
    """Whether the loss has an attribute of this name that is true."""
    return bool(getattr(loss, trait, False))


@runtime_checkable
class AdaptiveLoss(Protocol):
    """A loss whose settings change from step to step."""

    def adapted(self, metrics: Mapping[str, float]) -> Self:
        """The loss of the next step, given the metrics of this one."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint stores of it."""
        ...

    def with_state(self, state: Mapping[str, float]) -> Self: ...


Aggregation = Literal["token", "sequence", "constant"]


def aggregate(
    values: "Tensor", tokens: TokenBatch, *, by: Aggregation, length: int | None = None
) -> "Tensor":
    """This microbatch's share of the batch's mean of per-token values [N]. "token": mean over all
    tokens of the batch. "sequence": mean over sequences of the mean over their tokens. "constant":
    sum over tokens, divided by the number of sequences times `length`."""
    match by:
        case "token":
            return values.sum() / tokens.num_trained_tokens
        case "sequence":
            sequences = tokens.sequences
            return (values / sequences.lengths[sequences.ids]).sum() / tokens.num_sequences
        case "constant":
            assert length, "aggregation = 'constant' needs a length"
            return values.sum() / (tokens.num_sequences * length)
