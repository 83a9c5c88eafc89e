"""LoRA and DoRA: low-rank updates of a frozen model's linear layers and experts.

Promise: trainer and engines agree on which layers are adapted, on the names of the tensors and on
the merged weight. The head is never adapted. DoRA is LoRA with a magnitude: each row of the updated
weight is scaled to a trained length.

A layer is a linear module, or a 3-D parameter with the weights of experts, which has an A and a B
for each expert. R = rank; I, O = input and output size of a layer, E = its experts.
"""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.config import ALL_LINEAR, LoraConfig
from millrace.core.errors import ConfigError
from millrace.models.lora.experts import (
    EXPERT_WEIGHTS,
    check_adaptable,
    expert_modules,
    is_transposed,
)


def require_peft() -> None:
    """Raise ConfigError unless PEFT is installed; only the trainer needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[lora] needs PEFT, which is not installed; install millrace[lora], or leave [lora] out"
            " to train all weights."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """The layers of a model that an adapter changes, and its tensors."""

    layers: Mapping[str, tuple[int, ...]]  # [O, I] of each, or [E, O, I], by name
    rank: int
    scale: float  # of B A
    is_dora: bool = False
    transposed: frozenset[str] = frozenset()  # layers of experts whose weights are [E, I, O]
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # {} = not loaded yet

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the adapter's tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (*experts, num_out, num_in) in self.layers.items():
            sizes = ((*experts, self.rank, num_in), (*experts, num_out, self.rank), (num_out,))
            shapes |= dict(zip(tensor_names(layer, dora=self.is_dora), sizes, strict=False))
        return shapes

    def weight_name(self, layer: str) -> str:
        """The name of the parameter that a layer's adapter changes."""
        return layer if len(self.layers[layer]) == 3 else f"{layer}.weight"

    def merged(
        self,
        layer: str,
        weight: Tensor,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """A layer's weight with an adapter of these tensors merged, of its shape. DoRA needs the
        norms of float32 weights and ignores `dtype`."""
        dtype = torch.float32 if self.is_dora else dtype
        a, b, *magnitude = (
            factor.to(weight.device, dtype, non_blocking=True)
            for factor in factors_of(tensors, layer, dora=self.is_dora)
        )
        is_transposed = layer in self.transposed
        weight = weight.mT if is_transposed else weight
        product = torch.addmm if weight.ndim == 2 else torch.baddbmm
        updated = product(weight.to(dtype), b, a, alpha=self.scale)
        if magnitude:
            updated = updated * gain(updated, magnitude[0])[:, None]
        return updated.mT.contiguous() if is_transposed else updated


def adapter_of(model: PreTrainedModel, lora: LoraConfig) -> Adapter:
    """The adapter that these settings describe, without tensors."""
    layers = adapted_layers(model, lora)
    modules = [name for name, module in expert_modules(model).items() if is_transposed(module)]
    transposed = (f"{name}.{weight}" for name in modules for weight in EXPERT_WEIGHTS)
    return Adapter(
        layers=layers,
        transposed=frozenset(name for name in transposed if name in layers),
        rank=lora.rank,
        scale=scale_of(lora.alpha, rank=lora.rank, rslora=lora.rslora),
        is_dora=lora.dora,
    )


def adaptable_layers(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The layers that can be adapted: [O, I] of linear layers, [E, O, I] of experts, by name."""
    head = model.get_output_embeddings()
    layers: dict[str, tuple[int, ...]] = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }
    for name, module in expert_modules(model).items():
        for weight, p in module.named_parameters(recurse=False):
            if p.ndim == 3:
                layers[f"{name}.{weight}"] = tuple((p.mT if is_transposed(module) else p).shape)
    return layers


def adapted_layers(model: PreTrainedModel, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """The layers that the settings select, as adaptable_layers() describes them."""
    layers = adaptable_layers(model)
    if not layers:
        raise ConfigError(
            f"[lora] finds no linear layers in {type(model).__name__}; leave it out to train all"
            " weights."
        )
    chosen: set[str] = set(layers) if ALL_LINEAR in lora.target_modules else set()
    for target in (name for name in lora.target_modules if name != ALL_LINEAR):
        # PEFT's own rule for a list of names.
        found = {name for name in layers if name == target or name.endswith(f".{target}")}
        chosen |= found
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ConfigError(
                f"lora.target_modules has {target!r}, which is not an adaptable layer; this model"
                f" has {known}."
            )
    experts = {
        n: m for n, m in expert_modules(model).items() if any(c.startswith(f"{n}.") for c in chosen)
    }
    check_adaptable(experts.values())
    if experts and lora.dora:
        raise ConfigError(
            "lora.dora = true cannot adapt experts; list the linear layers to adapt in"
            " lora.target_modules, or set it to false."
        )
    return {name: shape for name, shape in layers.items() if name in chosen}


def tensor_names(layer: str, *, dora: bool) -> tuple[str, ...]:
    """Names of a layer's A [R, I], B [O, R] and, with DoRA, magnitude [O]. Those of experts are
    [E, R, I] and [E, O, R]."""
    names = (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")
    return (*names, f"{layer}.lora_magnitude_vector") if dora else names


def factors_of(tensors: Mapping[str, Tensor], layer: str, *, dora: bool) -> list[Tensor]:
    return [tensors[name] for name in tensor_names(layer, dora=dora)]


def scale_of(alpha: float, *, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def gain(updated: Tensor, magnitude: Tensor) -> Tensor:
    """Factors [O] that scale the rows of an updated weight [O, I] to DoRA's magnitude."""
    return magnitude / torch.linalg.vector_norm(updated, dim=1)
