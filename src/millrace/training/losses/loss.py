"""The contract between trainer and objective: what a loss is called with, and what it returns.

A loss is a frozen dataclass whose fields are its TOML keys. It is called once per microbatch with
the tokens trained there, and must divide by the totals of the whole batch: then the gradients of
the microbatches add up to the gradient of the batch, however it was split. The built-in ones are
put together in objectives/.

Imports torch for types only: the settings of a loss are checked before any process loads torch.

N = trained tokens of one microbatch, R = runs of them, K = tokens a teacher topk of at each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Tokens that belong together: those of a sequence, or of one turn of it."""

    ids: "Tensor"  # [N] int64; 0 .. R - 1
    lengths: "Tensor"  # [R] int64; tokens of each

    def sum(self, values: "Tensor") -> "Tensor":
        """Per token [N], the sum of `values` [N] over its run."""
        sums = values.new_zeros(len(self.lengths)).index_add(0, self.ids, values)
        return sums[self.ids]

    def mean(self, values: "Tensor") -> "Tensor":
        """Per token [N], the mean of `values` [N] over its run."""
        return self.sum(values) / self.lengths[self.ids]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopK:
    """Two distributions at each token, over the teacher's K likeliest there and, in the last
    column, all others together. Logprobs."""

    teacher: "Tensor"  # [N, K + 1] float32; NaN where nobody teaches
    trainer: "Tensor"  # [N, K + 1] float32; differentiable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """The trained tokens of one microbatch, and the totals of the batch it belongs to."""

    trainer_logprobs: "Tensor"  # [N] float32; differentiable
    engine_logprobs: "Tensor"  # [N] float32; of the policy that sampled the token
    entropies: "Tensor"  # [N] float32; differentiable
    advantages: "Tensor"  # [N] float32
    staleness: "Tensor"  # [N] int64; trainer Version minus the token's Version
    sequences: Runs  # those of a sequence lie in one microbatch
    turns: Runs  # tokens of a sequence with nothing but sampled tokens between them
    num_trained_tokens: int  # of the whole batch
    num_sequences: int  # of the whole batch
    proximal_logprobs: "Tensor | None" = None
    """[N] float32; the trainer's before the first update of the step. None = this is the first
    update, so they are trainer_logprobs."""
    reference_logprobs: "Tensor | None" = None
    """[N] float32; of the model that the policy shall stay close to, where the run has one."""
    teacher_logprobs: "Tensor | None" = None
    """[N] float32; of a teacher, where the run has one; NaN for tokens that it does not teach."""
    topk: "TopK | None" = None
    """Where a loss asks for it and the run has a teacher that tells of more than these tokens."""
    groups: Runs | None = None
    """Those of a group, where its sequences are compared and so lie in one microbatch."""
    num_groups: int = 0  # of the whole batch


class Loss(Protocol):
    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The microbatch's share of the batch's loss, and named per-token metrics [N].

        The trainer averages each metric over all trained tokens of the batch.
        """
        ...


@runtime_checkable
class Anchored(Protocol):
    """A loss that may want TokenBatch.proximal_logprobs, which can cost a forward pass more."""

    @property
    def needs_proximal(self) -> bool: ...


@runtime_checkable
class Distils(Protocol):
    """A loss that may want TokenBatch.topk, which costs the trainer a second look at its logits."""

    @property
    def needs_topk(self) -> bool: ...


@runtime_checkable
class Refers(Protocol):
    """A loss that may want TokenBatch.reference_logprobs."""

    @property
    def needs_reference(self) -> bool: ...


@runtime_checkable
class Adapts(Protocol):
    """A loss whose settings change from step to step."""

    def adapted(self, metrics: Mapping[str, float]) -> Self:
        """The loss of the next step; `metrics` are those of the one just done."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        ...

    def with_state(self, state: Mapping[str, float]) -> Self: ...


Aggregation = Literal["token", "sequence", "constant"]


def aggregate(
    values: "Tensor", tokens: TokenBatch, *, by: Aggregation, length: int | None = None
) -> "Tensor":
    """This microbatch's share of the batch's mean of per-token values [N].

    "token": every token of the batch weighs the same. "sequence": every sequence weighs the same,
    and its tokens share that equally. "constant": as if every sequence had `length` tokens, so that
    a token weighs the same in every batch.
    """
    match by:
        case "token":
            return values.sum() / tokens.num_trained_tokens
        case "sequence":
            sequences = tokens.sequences
            return (values / sequences.lengths[sequences.ids]).sum() / tokens.num_sequences
        case "constant":
            assert length, "aggregation by a constant needs one"
            return values.sum() / (tokens.num_sequences * length)
