"""Online DPO: of each group, the best sequence shall be likelier than the worst.

Promise: a pair lies in one microbatch, so that the batch's loss does not depend on its split.
N = trained tokens of one microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millrace.training.losses.checks import above, one_of
from millrace.training.losses.loss import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

Reference = Literal["engine", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceLoss:
    """-log sigmoid(beta * margin), averaged over the pairs of the batch.

    The margin is what log pi - reference adds up to over the tokens of the better sequence, minus
    the same of the worse. Which is which is in the sign of the advantages ("best_worst").
    """

    beta: float = 0.1
    reference: Reference = "engine"
    """What the policy is compared with: what the engine said, or a reference model."""

    def __post_init__(self) -> None:
        above("beta", self.beta, 0)
        one_of("reference", self.reference, get_args(Reference))

    @property
    def needs_reference(self) -> bool:
        return self.reference == "reference"

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        groups = tokens.groups
        assert groups is not None, "advantages of pairs are packed by pairs"
        reference = tokens.reference_logprobs if self.needs_reference else tokens.engine_logprobs
        assert reference is not None, "a run without a reference model refuses this at its start"
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
