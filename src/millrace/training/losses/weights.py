"""Importance ratios, weights of single tokens, and how a loss is averaged over a batch.

Log ratios are bounded before they are exponentiated, so no ratio overflows. Weights are constants
for the gradient; they multiply a token's objective, and a weight of 0 masks it.
N = trained tokens of a microbatch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millrace.core.plugins import plugin
from millrace.training.losses.loss import (
    COUNT,
    RATIO,
    SQUARED_RATIO,
    Aggregation,
    AtLeastOne,
    NonNegative,
    Positive,
    TokenBatch,
    TokenSegments,
    UnitInterval,
    aggregate,
)

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "turn", "sequence", "geometric"]
Denominator = Literal["policy", "token", "sequence"]

LOG_BOUND = 20.0  # ratios are bounded to e^-20 .. e^20


def log_ratio_at(log_ratio: "Tensor", tokens: TokenBatch, *, level: Level) -> "Tensor":  # [N]
    """The log ratio of the unit that each token belongs to. "token": its own. "turn", "geometric":
    the mean over its turn or sequence, so the ratio is a geometric mean. "sequence": the sum over
    its sequence, so the ratio is a product."""
    match level:
        case "token":
            pooled = log_ratio
        case "turn":
            pooled = tokens.turns.mean(log_ratio)
        case "sequence":
            pooled = tokens.sequences.sum(log_ratio)
        case "geometric":
            pooled = tokens.sequences.mean(log_ratio)
    return pooled.clamp(-LOG_BOUND, LOG_BOUND)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyRatio:
    """The policy against its anchor: the input of a surrogate."""

    log_ratio: "Tensor"  # [N] differentiable; at the chosen level
    logprobs: "Tensor"  # [N] differentiable
    anchor: "Tensor"  # [N]
    advantages: "Tensor"  # [N]
    tokens: TokenBatch  # what else is known of them


@plugin
class Ratio:
    ratio: Level = "token"
    """Level of the importance ratio: "token"; "turn" or "geometric" (GSPO), the geometric mean over
    a turn or a sequence; "sequence", the product over a sequence."""
    anchor: Literal["engine", "proximal", "interpolated"] = "engine"
    """Denominator of the importance ratio: "engine" = the logprobs that tokens were sampled with;
    "proximal" = those of the trainer before the first update of the step (decoupled PPO);
    "interpolated" = logprobs between trainer and engine, with the engine's share 1 / staleness
    (A-3PO)."""

    def compare(self, tokens: TokenBatch) -> PolicyRatio:
        anchor = self.anchor_logprobs(tokens)
        return PolicyRatio(
            log_ratio=log_ratio_at(tokens.trainer_logprobs - anchor, tokens, level=self.ratio),
            logprobs=tokens.trainer_logprobs,
            anchor=anchor,
            advantages=tokens.advantages,
            tokens=tokens,
        )

    def anchor_logprobs(self, tokens: TokenBatch) -> "Tensor":  # [N] constant
        current = tokens.trainer_logprobs.detach()
        match self.anchor:
            case "engine":
                return tokens.engine_logprobs
            case "proximal":
                return current if tokens.proximal_logprobs is None else tokens.proximal_logprobs
            case "interpolated":
                # Approximates the policy of one version ago as if logprobs had moved linearly from
                # version to version, so it needs no forward pass.
                engine_share = (tokens.staleness >= 1) / tokens.staleness.clamp(min=1)
                return current + engine_share * (tokens.engine_logprobs - current)


@plugin
class Correction:
    """Importance sampling correction from the engine's distribution to the anchor's, with
    w = anchor / engine (the behaviour weight of decoupled PPO, arXiv 2110.00641).

    With anchor = "engine" w would be 1. So there "mask" and "reject" use the trainer's present
    logprobs instead of the anchor's, and "truncate" is refused.
    """

    correction: Literal["none", "truncate", "mask", "reject"] = "none"
    """Importance sampling correction from the engine's distribution to the anchor's, by their ratio
    w: "truncate" = weight w, bounded to correction_low and correction_high; "mask" = weight w
    between these bounds and 0 outside; "reject" = weight 1 between them and 0 outside (rejection
    sampling); "none" = weight 1."""
    correction_level: Level = "token"
    """Level of the ratio w of the importance sampling correction: "token", "turn", "sequence" or
    "geometric", as in the key ratio."""
    correction_low: UnitInterval = 0.0
    """Lower bound of the ratio w of the importance sampling correction, from 0 to 1."""
    correction_high: AtLeastOne = 2.0
    """Upper bound of the ratio w of the importance sampling correction, at least 1."""

    def weights(self, tokens: TokenBatch, *, target: "Tensor") -> "Tensor | None":  # [N]
        """`target` [N] are the logprobs to correct to; None = all weights are 1."""
        if self.correction == "none":
            return None
        log_ratio = target - tokens.engine_logprobs
        ratio = log_ratio_at(log_ratio, tokens, level=self.correction_level).exp()
        if self.correction == "truncate":
            return ratio.clamp(self.correction_low, self.correction_high)
        is_inside = (ratio >= self.correction_low) & (ratio <= self.correction_high)
        return ratio * is_inside if self.correction == "mask" else is_inside.to(ratio.dtype)


@plugin
class StalenessWeight:
    max_token_staleness: NonNegative = math.inf
    """Largest staleness of a token with full weight, in versions; inf = no limit. Staler tokens are
    masked, or decay if staleness_half_life is above 0."""
    staleness_half_life: NonNegative = 0.0
    """Number of versions beyond max_token_staleness in which a token's weight halves; 0 = such
    tokens are masked."""

    def __post_init__(self) -> None:
        if self.staleness_half_life > 0 and math.isinf(self.max_token_staleness):
            raise ValueError(
                f"staleness_half_life = {self.staleness_half_life} has no effect without a limit;"
                " set max_token_staleness to where the decay starts"
            )

    def weights(self, tokens: TokenBatch) -> "Tensor | None":  # [N]
        if math.isinf(self.max_token_staleness):
            return None
        excess = (tokens.staleness - self.max_token_staleness).clamp(min=0)
        if self.staleness_half_life == 0:
            return (excess == 0).to(tokens.advantages.dtype)
        decay = math.log(2) / self.staleness_half_life
        return (-decay * excess).exp().to(tokens.advantages.dtype)


@plugin
class OffPolicyMask:
    off_policy_limit: Positive = math.inf
    """Limit of the off-policy sequence mask (DeepSeek-V3.2) in nats, above 0: tokens with A < 0 are
    masked if the mean of engine minus trainer logprob over their sequence exceeds it; inf = no
    mask."""

    def weights(self, tokens: TokenBatch) -> "Tensor | None":  # [N]
        if math.isinf(self.off_policy_limit):
            return None
        drift = tokens.sequences.mean(tokens.engine_logprobs - tokens.trainer_logprobs.detach())
        is_kept = (tokens.advantages >= 0) | (drift <= self.off_policy_limit)
        return is_kept.to(tokens.advantages.dtype)


@plugin
class SecondMomentMask:
    """The trust region of M2PO (arXiv 2510.01161), which masks few tokens however stale they are.

    Here it holds for each sequence, there for a batch: so it does not depend on how the batch is
    split. The published implementations take a microbatch."""

    second_moment: Positive = math.inf
    """Largest second moment, above 0: the mean of (log r)^2 over the tokens of a sequence that have
    moved in the direction of A. Those that moved furthest are masked until the others are within
    this limit; inf = no mask. M2PO uses 0.04."""
    second_moment_rule: Literal["sequence", "m2po", "areal"] = "sequence"
    """Tokens over which the second moment is taken: "sequence" = the kept tokens of a sequence that
    have moved in the direction of A; "m2po" (the authors' code) = the tokens of a microbatch that
    have done so, where a masked token counts like the kept one that moved furthest; "areal" = all
    kept tokens of a microbatch, whichever way they moved, with r = anchor / engine if the anchor is
    the proximal policy. With "m2po" and "areal", the loss depends on how a batch is divided into
    microbatches, and so on the number of ranks."""

    def weights(self, tokens: TokenBatch, *, target: "Tensor") -> "Tensor | None":  # [N]
        """`target` [N] are the logprobs that AReaL compares with those of the engine."""
        if math.isinf(self.second_moment):
            return None
        is_areal, segments = self.second_moment_rule == "areal", tokens.sequences
        if self.second_moment_rule != "sequence":
            ids = segments.ids.new_zeros(len(segments.ids))
            segments = TokenSegments(ids=ids, lengths=ids.new_full((1,), len(ids)))
        current = target if is_areal else tokens.trainer_logprobs.detach()
        moved = current - tokens.engine_logprobs
        is_counted = (moved * tokens.advantages > 0) | is_areal
        squares = (moved.square() * is_counted).double()
        # By segment, the nearest first: the mean over a token and all before it grows along them.
        order = squares.argsort(stable=True)
        order = order[segments.ids[order].argsort(stable=True)]
        ids, squares, counted = segments.ids[order], squares[order], is_counted[order]
        begins = segments.lengths.cumsum(0)[ids] - segments.lengths[ids]
        sums, counts = (_sum_from(begins, x) for x in (squares, counted.double()))
        if self.second_moment_rule == "m2po":
            total = counted.sum()
            sums, counts = sums + squares * (total - counts), total
        is_kept = (sums <= self.second_moment * counts) | ~counted
        if is_areal:
            is_kept[:1] = True  # AReaL never masks all
        return tokens.advantages.new_empty(len(ids)).index_copy(
            0, order, is_kept.to(tokens.advantages.dtype)
        )


def _sum_from(begins: "Tensor", values: "Tensor") -> "Tensor":  # [N]
    """The sum of `values` from the index `begins` of each to itself."""
    sums = values.cumsum(0)
    return sums - (sums - values)[begins]


@plugin
class VarianceControl:
    ess_scaling: bool | Literal["token", "sequence"] = False
    """Scaling of the learning rate of each update by the square root of the effective sample size
    of its importance ratios, as a share of all (VCPO, arXiv 2602.17616): if few tokens have large
    ratios, the gradient is noisy and the step is short. "token" or true counts tokens; "sequence"
    counts sequences, each with its mean ratio, as the authors' code does; false = no scaling."""
    minimum_variance_baseline: bool = False
    """Baseline that minimises the variance of a group's gradient (VCPO, arXiv 2602.17616): the mean
    of the group's advantages, weighted by the squared ratio and the squared gradient norm of each
    sequence, is subtracted from them. It costs one more pass per sequence, and all rollouts of a
    group are in one microbatch."""

    def sample_sizes(self, log_ratio: "Tensor", tokens: TokenBatch) -> "dict[str, Tensor]":
        """Per-token metrics whose sums give the effective sample size; `log_ratio` [N]."""
        ratio, sequences = log_ratio.detach().exp(), tokens.sequences
        count = ratio.new_ones(len(ratio))
        if self.ess_scaling == "sequence":
            ratio, count = sequences.mean(ratio), count / sequences.lengths[sequences.ids]
        return {COUNT: count, RATIO: count * ratio, SQUARED_RATIO: count * ratio.square()}


@plugin
class LossAverage:
    aggregation: Aggregation = "token"
    """Average of the loss over a batch: "token", the mean over tokens (DAPO); "sequence", the mean
    over sequences of the mean over their tokens (GRPO); "constant", the sum over tokens divided by
    the number of sequences times `length` (Dr. GRPO)."""
    length: Annotated[int, Field(ge=1)] | None = None
    """Divisor of aggregation = "constant", in tokens; by default sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and self.length is None:
            raise ValueError("aggregation = 'constant' needs a length")
        if self.aggregation != "constant" and self.length is not None:
            raise ValueError(
                f"length = {self.length} needs aggregation = 'constant', not"
                f" {self.aggregation!r}; leave it out"
            )

    def __call__(self, values: "Tensor", tokens: TokenBatch) -> "Tensor":
        return aggregate(values, tokens, by=self.aggregation, length=self.length)

    def of_term(self, denominator: Denominator) -> "LossAverage":
        """The average of a regulariser beside the policy's term, which has this average."""
        return self if denominator == "policy" else LossAverage(aggregation=denominator)
