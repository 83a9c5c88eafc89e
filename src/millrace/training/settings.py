"""How a model is trained, whatever it learns: the policy and its critic share these settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from millrace.config.training import ADAMW


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
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
