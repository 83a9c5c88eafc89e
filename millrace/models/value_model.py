"""A language model's backbone with a head that says what a state is worth.

Promise: values are float32, whatever the backbone computes in, and 0 until the head has learned.
T = rows of a forward pass, D = hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """`model` is what load_model returned; its own head is not kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        backbone = model.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.backbone = backbone
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, hidden: Tensor) -> Tensor:  # [T, D] -> [T]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.float()).squeeze(-1)
