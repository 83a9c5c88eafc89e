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

from millrace.config import LoraConfig
from millrace.models.adapters import adapted_linears, merged, scale_of, tensor_names


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        """`model` is the base model, its projections not yet joined."""
        linears = adapted_linears(model, lora)
        self._scale = scale_of(lora)
        self._rank = lora.rank
        self._bases = {name: linear.weight.detach().clone() for name, linear in linears.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of an adapter."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, base in self._bases.items():
            a, b = tensor_names(layer)
            shapes[a] = (self._rank, base.shape[1])
            shapes[b] = (base.shape[0], self._rank)
        return shapes

    def merge(self, adapter: Mapping[str, Tensor], *, into: Mapping[str, Tensor]) -> None:
        """Make the weights `into` those of the base model with this adapter."""
        for layer, base in self._bases.items():
            a, b = (
                adapter[name].to(base.device, torch.float32, non_blocking=True)
                for name in tensor_names(layer)
            )
            into[f"{layer}.weight"].copy_(merged(base, a=a, b=b, scale=self._scale))
