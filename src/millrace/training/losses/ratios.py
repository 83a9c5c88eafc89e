"""Importance ratios of the policy against an anchor, per token, turn or sequence.

Log ratios are bounded before they are exponentiated, so no ratio overflows.
N = trained tokens of a microbatch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import one_of
from millrace.training.losses.loss import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "turn", "sequence", "geometric"]
Anchor = Literal["engine", "proximal", "interpolated"]

LOG_BOUND = 20.0  # ratios are bounded to e^-20 .. e^20


def log_ratio_at(log_ratio: "Tensor", tokens: TokenBatch, *, level: Level) -> "Tensor":  # [N]
    """The log ratio of the unit that each token belongs to.

    "token": its own. "turn", "geometric": the mean over its turn or sequence, so the ratio is a
    geometric mean. "sequence": the sum over its sequence, so the ratio is a product.
    """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    ratio: Level = "token"
    """Level of the importance ratio: "token"; "turn" or "geometric" (GSPO), the geometric mean over
    a turn or a sequence; "sequence", the product over a sequence."""
    anchor: Anchor = "engine"
    """Denominator of the importance ratio: the "engine" logprobs that tokens were sampled with; the
    "proximal" policy, which is the trainer before the first update of the step (decoupled PPO);
    "interpolated" between engine and trainer with engine share 1 / staleness (A-3PO)."""

    def __post_init__(self) -> None:
        one_of("ratio", self.ratio, get_args(Level))
        one_of("anchor", self.anchor, get_args(Anchor))

    def compare(self, tokens: TokenBatch) -> PolicyRatio:
        anchor = self.anchor_logprobs(tokens)
        return PolicyRatio(
            log_ratio=log_ratio_at(tokens.trainer_logprobs - anchor, tokens, level=self.ratio),
            logprobs=tokens.trainer_logprobs,
            anchor=anchor,
            advantages=tokens.advantages,
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
