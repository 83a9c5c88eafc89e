"""LoRA and DoRA: low-rank updates of a frozen model's linear layers.

Promise: trainer and engines agree on which layers are adapted, on the names of the tensors and on
the merged weight. The head is never adapted. DoRA is LoRA with a magnitude: each row of the updated
weight is scaled to a trained length.

R = rank; I, O = input and output size of a layer.
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


def require_peft() -> None:
    """Raise ConfigError unless PEFT is installed; only the trainer needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[lora] needs PEFT, which is not installed; install millrace[lora], or leave [lora] out"
            " to train all weights."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Factors:
    """The adapter's tensors of one layer."""

    a: Tensor  # [R, I]
    b: Tensor  # [O, R]
    magnitude: Tensor | None  # [O]; DoRA's

    def to(self, device: torch.device, dtype: torch.dtype) -> "Factors":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype, non_blocking=True)

        magnitude = None if self.magnitude is None else moved(self.magnitude)
        return Factors(a=moved(self.a), b=moved(self.b), magnitude=magnitude)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """The layers of a model that an adapter changes, and its tensors."""

    layers: Mapping[str, tuple[int, int]]  # [O, I] of each, by name
    rank: int
    scale: float  # of B A
    is_dora: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # {} = not loaded yet

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the adapter's tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (num_out, num_in) in self.layers.items():
            sizes = ((self.rank, num_in), (num_out, self.rank), (num_out,))
            shapes |= dict(zip(tensor_names(layer, dora=self.is_dora), sizes, strict=False))
        return shapes


def adapter_of(model: PreTrainedModel, lora: LoraConfig) -> Adapter:
    """The adapter that these settings describe, without tensors."""
    layers = adapted_linears(model, lora).items()
    return Adapter(
        layers={name: (layer.out_features, layer.in_features) for name, layer in layers},
        rank=lora.rank,
        scale=scale_of(lora.alpha, rank=lora.rank, rslora=lora.rslora),
        is_dora=lora.dora,
    )


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that can be adapted, by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }


def adapted_linears(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Linear]:
    """The layers that the settings select, by name."""
    linears = linear_layers(model)
    if not linears:
        raise ConfigError(
            f"[lora] finds no linear layers in {type(model).__name__}; leave it out to train all"
            " weights."
        )
    if ALL_LINEAR in lora.target_modules:
        return linears
    chosen: set[str] = set()
    for target in lora.target_modules:
        # PEFT's own rule for a list of names.
        found = {name for name in linears if name == target or name.endswith(f".{target}")}
        chosen |= found
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ConfigError(
                f"lora.target_modules has {target!r}, which is not an adaptable layer; this model"
                f" has {known}."
            )
    return {name: linear for name, linear in linears.items() if name in chosen}


def tensor_names(layer: str, *, dora: bool) -> tuple[str, ...]:
    """Names of a layer's tensors, in the order of Factors."""
    names = (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")
    return (*names, f"{layer}.lora_magnitude_vector") if dora else names


def factors_of(tensors: Mapping[str, Tensor], layer: str, *, dora: bool) -> Factors:
    a, b, *magnitude = (tensors[name] for name in tensor_names(layer, dora=dora))
    return Factors(a=a, b=b, magnitude=magnitude[0] if magnitude else None)


def scale_of(alpha: float, *, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def merged(weight: Tensor, factors: Factors, *, scale: float) -> Tensor:
    """The layer's weight with the adapter merged, [O, I] float32."""
    updated = torch.addmm(weight.float(), factors.b, factors.a, alpha=scale)
    if factors.magnitude is None:
        return updated
    return updated * gain(updated, factors.magnitude)[:, None]


def gain(updated: Tensor, magnitude: Tensor) -> Tensor:
    """Factors [O] that scale the rows of an updated weight [O, I] to DoRA's magnitude."""
    return magnitude / torch.linalg.vector_norm(updated, dim=1)
