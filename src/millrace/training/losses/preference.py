"""Online DPO: the best sequence of each group becomes more likely relative to the worst.

Promise: a pair lies in one microbatch, so the batch's loss does not depend on how it is split.
N = trained tokens of a microbatch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from millrace.core.plugins import plugin
from millrace.training.losses.loss import Positive, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

Reference = Literal["engine", "reference"]


@plugin
class PreferenceLoss:
    """DPO (arXiv 2305.18290) on fresh pairs: -log sigmoid(beta * margin), averaged over pairs.

    The margin is the sum of log pi - reference over the tokens of the better sequence, minus that
    of the worse. The sign of the advantages ("best_worst") says which is which.
    """

    beta: Positive = 0.1
    """DPO beta: coefficient of the implicit reward, above 0."""
    reference: Reference = "engine"
    """Reference policy of DPO: "engine", the logprobs that tokens were sampled with, or
    "reference", a reference model."""

    @property
    def needs_reference(self) -> bool:
        return self.reference == "reference"

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        groups = tokens.groups
        assert groups is not None, "batches for a preference loss are packed with pairs=True"
        reference = tokens.reference_logprobs if self.needs_reference else tokens.engine_logprobs
        assert reference is not None, "a run without a reference model is refused at its start"
        sign = tokens.advantages.sign()
        margin = groups.sum(sign * (tokens.trainer_logprobs - reference))  # [N]; of its group
        has_pair = groups.sum(sign.abs()) > 0
        per_group = margin.new_zeros(()).logaddexp(-self.beta * margin) * has_pair
        loss = (per_group / groups.lengths[groups.ids]).sum() / tokens.num_groups
        metrics = {
            "preference/margin": margin.detach(),
            "preference/accuracy": (margin > 0).float(),
        }
        return loss, metrics
