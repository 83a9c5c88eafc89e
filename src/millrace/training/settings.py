"""How a model is trained, whatever it learns: the policy and its critic share these settings."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
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
