"""Merges LoRA adapters into the weights an engine decodes with.

Promise: merge() computes each weight from the base model's own, in float32, and rounds once. So
versions leave no trace in each other, and an adapter that is zero gives the base model back, bit
for bit. Weights are written in place: CUDA graphs and joined projections stay valid.

Costs a copy of the adapted weights. Used by the engine's thread.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.models.adapters import Adapter, factors_of, merged


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`model` is the base model, its projections not yet joined."""
        self.adapter = adapter
        self._bases = {
            name: model.get_submodule(name).get_parameter("weight").detach().clone()
            for name in adapter.layers
        }

    def merge(self, tensors: Mapping[str, Tensor], *, into: Mapping[str, Tensor]) -> None:
        """Make the weights `into` those of the base model with these tensors of the adapter."""
        is_dora, scale = self.adapter.is_dora, self.adapter.scale
        for layer, base in self._bases.items():
            factors = factors_of(tensors, layer, dora=is_dora)
            factors = factors.to(base.device, torch.float32)
            into[f"{layer}.weight"].copy_(merged(base, factors, scale=scale))
