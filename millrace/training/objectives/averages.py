"""What a batch's loss is a mean of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from millrace.training.losses import Aggregation, TokenBatch, aggregate
from millrace.training.objectives.checks import one_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    aggregation: Aggregation = "token"
    """"token": every token weighs the same. "sequence": every sequence does. "constant": every
    sequence counts as one of `length` tokens."""
    length: int | None = None
    """Of "constant"; by default sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, get_args(Aggregation))
        if self.aggregation == "constant":
            if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
                raise ValueError(f"length = {self.length!r} must be a whole number, at least 1")
        elif self.length is not None:
            raise ValueError(
                f"length = {self.length} divides only what aggregation = 'constant' adds up, not"
                f" {self.aggregation!r}; leave it out"
            )

    def __call__(self, values: "Tensor", tokens: TokenBatch) -> "Tensor":
        return aggregate(values, tokens, by=self.aggregation, length=self.length)
