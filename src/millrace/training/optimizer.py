"""How a model is trained: precision, optimizer, learning-rate schedule and float16 loss scale.

Most gradients of a language model are smaller than the smallest float16 number. So the loss is
multiplied by a power of two before the backward pass and the gradients are divided by it
afterwards. The power is as large as it has recently been without an overflow.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from millrace.config.training import ADAMW
from millrace.core.errors import ConfigError
from millrace.core.plugins import load_reference


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings that the policy and its critic share."""

    optimizer: str = ADAMW  # or "module:Class" of a torch.optim.Optimizer
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0  # of matrices; norms and biases are not decayed
    max_grad_norm: float = 1.0
    compute_dtype: torch.dtype = torch.float32  # weights and optimizer state are always float32
    gradient_checkpointing: bool = False
    compile_layers: bool = False

    def autocast(self, device: torch.device) -> torch.autocast:
        """A context in which matrix products run in compute_dtype."""
        is_half = self.compute_dtype is not torch.float32
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=is_half)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate by step. It depends on the step alone, so it has no state in checkpoints."""

    learning_rate: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int
    min_share: float = 0.0  # of learning_rate, at total_steps; linear and cosine

    def at(self, step: int) -> float:
        """`step` counts from 0; warm-up reaches the full rate at step warmup_steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.min_share + (1 - self.min_share) * self._height(step))

    def _height(self, step: int) -> float:
        """Decay from 1 after warm-up to 0 at total_steps."""
        if self.kind == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, progress)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of all parameters; the trainer sets the learning rate before each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        # Norms and biases are not decayed: that changes scale, not complexity.
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.optimizer == ADAMW:
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, fused=True)
    name = settings.optimizer  # the user's own class, given lr and the further keys of [optimizer]
    try:
        made = load_reference(name)(groups, lr=0.0, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section 'optimizer' does not fit {name!r}: {error}.") from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.type = {name!r} is not a torch.optim.Optimizer.")
    return made


_INITIAL = 2.0**16
_MAX = 2.0**24
_GROWTH_INTERVAL = 200  # updates without overflow before the scale is doubled


class LossScale:
    """Dynamic loss scale; 1 if it is off. Used by the trainer's thread."""

    def __init__(self, *, is_on: bool) -> None:
        self.value = _INITIAL if is_on else 1.0
        self._is_on = is_on
        self._num_good = 0

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        if self._is_on:
            for gradient in gradients:
                gradient.div_(self.value)

    def lower(self) -> bool:
        """Halve the scale after an overflow; False if the scale cannot be the reason."""
        self._num_good = 0
        if self.value <= 1.0:
            return False
        self.value /= 2
        return True

    def succeeded(self) -> None:
        """Count an update with finite gradients, and double the scale now and then."""
        self._num_good += 1
        if self._is_on and self._num_good % _GROWTH_INTERVAL == 0:
            self.value = min(2 * self.value, _MAX)
