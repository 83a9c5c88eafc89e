"""Merges LoRA adapters into the weights an engine decodes with.

Promise: each weight is computed from the base model's own, in float32, and rounded once. So
versions leave no trace in each other, and an adapter that is zero gives the base model back, bit
for bit.

Costs two copies of the adapted weights: the base model's, and those of the version that is being
prepared. May run in another thread than the one that decodes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.models.lora.factors import Adapter, factors_of, merged


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`model` is the base model, its projections not yet joined."""
        self.adapter = adapter
        self._bases = {
            name: model.get_submodule(name).get_parameter("weight").detach().clone()
            for name in adapter.layers
        }

    def prepare(
        self, tensors: Mapping[str, Tensor], *, live: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The `live` weights that an adapter with these tensors changes, each with its new value;
        they are not written to."""
        is_dora, scale = self.adapter.is_dora, self.adapter.scale
        pairs: list[tuple[Tensor, Tensor]] = []
        for layer, base in self._bases.items():
            factors = factors_of(tensors, layer, dora=is_dora)
            factors = factors.to(base.device, torch.float32)
            value = merged(base, factors, scale=scale).to(base.dtype)
            pairs.append((live[f"{layer}.weight"], value))
        return pairs
