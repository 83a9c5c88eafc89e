"""AdamW and its learning rate."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from millrace.training.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate by step. A function of the step alone, so resuming needs no state of it."""

    learning_rate: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int
    min_share: float = 0.0  # of learning_rate; where linear and cosine would be at total_steps

    def at(self, step: int) -> float:
        """`step` counts from 0; warm-up rises to the full rate at step warmup_steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.min_share + (1 - self.min_share) * self._height(step))

    def _height(self, step: int) -> float:
        """From 1 after warm-up down to 0 at total_steps."""
        if self.kind == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, progress)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(model: nn.Module, technique: Technique) -> torch.optim.AdamW:
    """AdamW over all parameters; the trainer sets the learning rate before each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": technique.weight_decay},
        # Norms and biases: pulling these towards zero changes scale, not complexity.
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=technique.betas, fused=True
    )
