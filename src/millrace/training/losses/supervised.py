"""Supervised fine-tuning: every trained token becomes more likely."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from millrace.core.plugins import plugin
from millrace.training.losses.loss import TokenBatch, aggregate

if TYPE_CHECKING:
    from torch import Tensor


@plugin
class SupervisedLoss:
    """Cross-entropy, averaged over the trained tokens of the batch; advantages do not count."""

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        return aggregate(-tokens.trainer_logprobs, tokens, by="token"), {}
