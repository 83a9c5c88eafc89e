"""Distillation from a teacher: a term of the advantages, or a divergence that is minimised.

With p the teacher's distribution and q the policy's, over the teacher's most likely ids and, as one
more outcome, all other ids together:

    reverse_kl    log p - log q of the sampled token, as a constant, is added to its advantage, so
                  that its policy gradient is that of KL(q, p) (on-policy distillation)
    forward_kl    KL(p, q)
    jsd           beta KL(p, m) + (1 - beta) KL(q, m), with m = beta p + (1 - beta) q
                  (generalized JSD, Agarwal et al. 2024)

The latter two have gradients of their own and need no ratio. Tokens without a teacher count 0.
Whether a run has a teacher at all is checked before it starts.
N = trained tokens of a microbatch, K = ids per token that a teacher gives logprobs for.
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
    """Divergence from the teacher: "none", "reverse_kl", "forward_kl" or "jsd". By default as the
    teacher's [[scorers]] says, or none."""
    distil_weight: float = 1.0
    """Coefficient of the divergence, at least 0."""
    distil_beta: float = 0.5
    """Interpolation of "jsd", from 0.001 to 0.999: near 0 it is proportional to forward_kl, near 1
    to reverse_kl."""
    reward_weight: float = 1.0
    """Coefficient of the advantages from rewards, at least 0; 0 = learn from the teacher alone."""

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
        """The tokens with the advantages that the policy gradient uses."""
        advantages = self.reward_weight * tokens.advantages
        if self.distil == "reverse_kl":
            advantages = advantages - self.distil_weight * self.sampled_kl(tokens)
        return dataclasses.replace(tokens, advantages=advantages)

    def divergence(self, tokens: TokenBatch) -> "Tensor":  # [N]
        """forward_kl or jsd at each token, without the coefficient; 0 without a teacher."""
        if tokens.topk is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        has_teacher = ~tokens.topk.teacher[:, :1].isnan()
        teacher = tokens.topk.teacher.where(has_teacher, tokens.topk.trainer.detach())
        topk = TopK(teacher=teacher, trainer=tokens.topk.trainer)
        values = forward_kl(topk) if self.distil == "forward_kl" else jsd(topk, self.distil_beta)
        return values * has_teacher[:, 0]

    def sampled_kl(self, tokens: TokenBatch) -> "Tensor":  # [N] constant
        """log q - log p of the sampled tokens, whose mean estimates KL(q, p); 0 without a
        teacher."""
        if tokens.teacher_logprobs is None:
            return tokens.advantages.new_zeros(len(tokens.advantages))
        difference = tokens.trainer_logprobs.detach() - tokens.teacher_logprobs
        return difference.clamp(-LOG_BOUND, LOG_BOUND).nan_to_num(nan=0.0)


def forward_kl(topk: TopK) -> "Tensor":  # [N]
    return (topk.teacher.exp() * (topk.teacher - topk.trainer)).sum(-1)


def jsd(topk: TopK, beta: float) -> "Tensor":  # [N]
    p, q = topk.teacher, topk.trainer
    mixed = (p + math.log(beta)).logaddexp(q + math.log1p(-beta))
    from_teacher = (p.exp() * (p - mixed)).sum(-1)
    from_policy = (q.exp() * (q - mixed)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_policy
