"""How far the policy has moved: its probability against an anchor's, over a token or more.

Logarithms of ratios are bounded before anything is made of them, so that no ratio overflows.
N = trained tokens of one microbatch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import one_of
from millrace.training.losses.loss import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "turn", "sequence", "geometric"]
Anchor = Literal["engine", "proximal", "interpolated"]

LOG_BOUND = 20.0  # ratios beyond e^20, and below e^-20, are taken for these


def pooled(log_ratio: "Tensor", tokens: TokenBatch, *, level: Level) -> "Tensor":
    """Per token [N], the log ratio of what it is judged by: of itself, or of its whole sequence
    (their product), or as a geometric mean over its sequence or turn."""
    match level:
        case "token":
            whole = log_ratio
        case "turn":
            whole = tokens.turns.mean(log_ratio)
        case "sequence":
            whole = tokens.sequences.sum(log_ratio)
        case "geometric":
            whole = tokens.sequences.mean(log_ratio)
    return whole.clamp(-LOG_BOUND, LOG_BOUND)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """The policy beside its anchor, as shapes see it."""

    log_ratio: "Tensor"  # [N] differentiable; at the chosen level
    logprobs: "Tensor"  # [N] differentiable
    anchor: "Tensor"  # [N]
    advantages: "Tensor"  # [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    ratio: Level = "token"
    """What is weighed: each token, each turn or sequence by the geometric mean of its tokens
    ("turn", "geometric"), or each sequence by their product ("sequence")."""
    anchor: Anchor = "engine"
    """Against what: what the engine said; what the trainer said before the first update of the
    step ("proximal"); or a mean of what both say now, in which the engine's share is 1 / staleness
    ("interpolated")."""

    def __post_init__(self) -> None:
        one_of("ratio", self.ratio, get_args(Level))
        one_of("anchor", self.anchor, get_args(Anchor))

    def compare(self, tokens: TokenBatch) -> Compared:
        anchor = self.anchor_logprobs(tokens)
        return Compared(
            log_ratio=pooled(tokens.trainer_logprobs - anchor, tokens, level=self.ratio),
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
                # As if the policy had moved evenly from version to version, and the anchor were
                # the one before the last: no forward pass is needed to know it.
                engine_share = (tokens.staleness >= 1) / tokens.staleness.clamp(min=1)
                return current + engine_share * (tokens.engine_logprobs - current)
