"""What a teacher adds to an objective: advantages of its own, or a distance to be made smaller.

With p the teacher's distribution and q the policy's, over the teacher's likeliest tokens and, as
one more, all others together:

    reverse_kl    log p - log q of the drawn token, as a constant, is added to its advantage: its
                  policy gradient is that of KL(q, p)
    forward_kl    KL(p, q)
    jsd           beta KL(p, m) + (1 - beta) KL(q, m), with m = beta p + (1 - beta) q

The latter two have gradients of their own and need no ratio. Tokens that nobody teaches count 0;
whether a run has a teacher at all is known before it starts.
N = trained tokens of one microbatch, K = tokens a teacher topk of at each.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import at_least, one_of, within
from millrace.training.losses.loss import TokenBatch, TopK
from millrace.training.losses.ratios import LOG_BOUND

if TYPE_CHECKING:
    from torch import Tensor

Distil = Literal["none", "reverse_kl", "forward_kl", "jsd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    distil: Distil = "none"
    """How a teacher is learned from. By default as its [[scorers]] says, or not at all."""
    distil_weight: float = 1.0
    """Of what it adds, beside the rewards."""
    distil_beta: float = 0.5
    """Of "jsd": near 0 it is like forward_kl, near 1 like reverse_kl, but smaller."""
    reward_weight: float = 1.0
    """Of the advantages that rewards give; 0 = learn from the teacher alone."""

    def __post_init__(self) -> None:
        one_of("distil", self.distil, get_args(Distil))
        at_least("distil_weight", self.distil_weight, 0)
        within("distil_beta", self.distil_beta, low=1e-3, high=1 - 1e-3)
        at_least("reward_weight", self.reward_weight, 0)

    @property
    def is_on(self) -> bool:
        return self.distil != "none"

    @property
    def needs_topk(self) -> bool:
        return self.distil in ("forward_kl", "jsd")

    def with_advantages(self, tokens: TokenBatch) -> TokenBatch:
        """As the policy's own term sees them."""
        advantages = self.reward_weight * tokens.advantages
        if self.distil == "reverse_kl":
            advantages = advantages + self.distil_weight * self._lead(tokens)
        return dataclasses.replace(tokens, advantages=advantages)

    def per_token(self, tokens: TokenBatch) -> "Tensor":  # [N]
        """The distance from the teacher, without the weight."""
        if tokens.topk is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        is_taught = ~tokens.topk.teacher[:, :1].isnan()
        teacher = tokens.topk.teacher.where(is_taught, tokens.topk.trainer.detach())
        topk = TopK(teacher=teacher, trainer=tokens.topk.trainer)
        distance = forward_kl(topk) if self.distil == "forward_kl" else jsd(topk, self.distil_beta)
        return distance * is_taught[:, 0]

    def lag(self, tokens: TokenBatch) -> "Tensor":  # [N]
        """Metric: log q - log p of the drawn tokens, whose mean estimates KL(q, p)."""
        return -self._lead(tokens)

    def _lead(self, tokens: TokenBatch) -> "Tensor":  # [N] constant
        """log p - log q of the drawn tokens; 0 where nobody teaches."""
        if tokens.teacher_logprobs is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        lead = tokens.teacher_logprobs - tokens.trainer_logprobs.detach()
        return lead.clamp(-LOG_BOUND, LOG_BOUND).nan_to_num(nan=0.0)


def forward_kl(topk: TopK) -> "Tensor":  # [N]
    return (topk.teacher.exp() * (topk.teacher - topk.trainer)).sum(-1)


def jsd(topk: TopK, beta: float) -> "Tensor":  # [N]
    p, q = topk.teacher, topk.trainer
    mixed = (p + math.log(beta)).logaddexp(q + math.log1p(-beta))
    from_teacher = (p.exp() * (p - mixed)).sum(-1)
    from_policy = (q.exp() * (q - mixed)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_policy
