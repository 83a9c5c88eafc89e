"""How a model is trained, whatever it learns: one Technique serves the policy and its critic."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    compute_dtype: torch.dtype = torch.float32  # weights and optimizer state are float32 anyway
    gradient_checkpointing: bool = False
    compile_layers: bool = False

    def autocast(self, device: torch.device) -> torch.autocast:
        """Compute in compute_dtype where that is enough."""
        is_half = self.compute_dtype is not torch.float32
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=is_half)
