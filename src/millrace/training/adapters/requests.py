"""What callers pass to an AdapterSet. Torch-free, because a server builds these records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TARGETS = "target_tokens"
PASS_TOKENS = 8192  # tokens or targets of one forward pass, unless a single datum has more
ENDED = "The session of the model has ended; continue from a saved state."  # an error


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """Which layers an adapter changes, and its rank. The head is never adapted."""

    rank: int
    attention: bool = True
    mlp: bool = True  # experts included


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """The settings of one AdamW step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0 = no clipping


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingDatum:
    tokens: np.ndarray  # [L] int64
    # Inputs of the loss by name, each [L] or [L, K]. Row i of the targets follows tokens[: i + 1].
    inputs: Mapping[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        """Tokens or targets, whichever are more: a token may have any number of targets."""
        return max(self.tokens.size, self.inputs.get(TARGETS, self.tokens).size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterPass:
    """A forward pass of an adapter over data, with or without the backward pass."""

    model_id: str
    data: Sequence[TrainingDatum]
    loss: str
    settings: Mapping[str, float]  # of the loss
    backward: bool

    @property
    def num_tokens(self) -> int:
        return sum(datum.num_tokens for datum in self.data)


# The logprobs of the targets of each datum, float32 of their shape, and the summed loss.
PassResult = tuple[list[np.ndarray], float]
