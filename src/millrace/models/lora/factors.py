"""LoRA and DoRA: low-rank updates of a frozen model's linear layers and experts.

Promise: trainer and engines agree on which layers are adapted, on the names of the tensors and on
the merged weight. The head is never adapted. DoRA is LoRA with a magnitude: each row of the updated
weight is scaled to a trained length.

A layer is a linear module, or a 3-D parameter with the weights of experts: transformers keeps the
experts of a layer as two parameters of one module, some transposed and with biases (GPT-OSS). Its
adapter has an A and a B for each expert, in one tensor each. forward_with_lora replaces the
module's forward function, in the trainer and for unmerged adapters of engines: it adds (x Aᵀ) Bᵀ
to each grouped product.

R = rank; I, O = input and output size of a layer, E = its experts, T = tokens of a pass,
K = experts per token, S = T K rows of a grouped product, sorted by expert.
"""

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.config import ALL_LINEAR, LoraConfig
from millrace.core.errors import ConfigError
from millrace.models.sharding import local_part, shard_experts

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # [E, O, I] or [E, I, O]; in the order of their use
_ALIGNED = 8  # on a GPU, grouped products need rows of a multiple of 16 bytes


class TrainedUpdate(nn.Module):
    """The factors of one expert weight in training. B is 0: a new adapter changes nothing."""

    def __init__(self, weight: Tensor, *, shape: tuple[int, ...], rank: int, scale: float) -> None:
        """`shape`: [E, O, I] of the weight."""
        super().__init__()
        num_experts, num_out, num_in = shape
        kind = {"dtype": torch.float32, "device": weight.device}
        a = torch.empty(num_experts, rank, num_in, **kind)
        nn.init.uniform_(a, -(num_in**-0.5), num_in**-0.5)  # as PEFT initializes it
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(torch.zeros(num_experts, num_out, rank, **kind))
        self.is_enabled = True
        self._scale = scale
        shard_experts(self, like=weight)

    def add(self, output: Tensor, x: Tensor, *, offsets: Tensor, tokens: Tensor) -> Tensor:
        """The output [S, O] for x [S, I] with the update added. `offsets` [E] int32: ends of the
        experts' rows. `tokens` [S]: the token of each row."""
        return self(output, x, offsets) if self.is_enabled else output

    def forward(self, output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        a, b = (local_part(factor).to(x.dtype) for factor in (self.lora_A, self.lora_B))
        if padding := -a.shape[1] % _ALIGNED:  # else a copy would be kept for the backward pass
            a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        return output + self._scale * grouped(grouped(x, a, offsets), b, offsets)


def aligned(rank: int) -> int:
    """The rank, rounded up to what grouped products need."""
    return rank + -rank % _ALIGNED


def add_update(module: Any, weight: str, update: Any) -> None:
    """Make a module of experts add the update, which has TrainedUpdate.add(), to its product with
    this weight. An update that is a module becomes a part of it."""
    if not hasattr(module, "expert_updates"):
        module.expert_updates = nn.ModuleDict() if isinstance(update, nn.Module) else {}
        # One function for all layers: torch.compile would build a program for each closure.
        set_forward(module, MethodType(forward_with_lora, module))
    module.expert_updates[weight] = update


def local_forward(module: Any) -> Any:
    """What a module of experts computes on one rank: under expert parallelism, its forward function
    sends tokens to their experts before and back after it."""
    return getattr(module, "local_forward", module.forward)


def set_forward(module: nn.Module, function: Any) -> None:
    """Replace local_forward(module)."""
    setattr(module, "local_forward" if hasattr(module, "local_forward") else "forward", function)


def forward_with_lora(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The output [T, O] of experts for hidden states [T, I], with indices and weights [T, K]."""
    num_tokens, top_k = indices.shape
    updates = getattr(module, "expert_updates", {})
    # The rows of an expert stay in the order of their tokens: adapters may have contiguous tokens.
    experts, order = indices.reshape(-1).sort(stable=True)
    tokens = order // top_k
    # histc counts without a wait for the device. It takes no integers on CPUs.
    ids = experts.float() if hidden.device.type == "cpu" else experts.int()
    counts = torch.histc(ids, bins=module.num_experts, min=0, max=module.num_experts - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    # Under expert parallelism, ids of other ranks' experts come last; no product computes them.
    is_shared = getattr(module, "_is_expert_parallel", False)  # unknown to older transformers
    is_foreign = (experts >= module.num_experts)[:, None] if is_shared else None

    def own(rows: Tensor) -> Tensor:
        return rows if is_foreign is None else rows.masked_fill(is_foreign, 0.0)

    def product(name: str, x: Tensor) -> Tensor:
        weight = getattr(module, name)
        x = x.to(weight.dtype)
        if is_transposed(module):
            weight = weight.transpose(-2, -1)
        output = grouped(x, weight, offsets)
        if (bias := getattr(module, f"{name}_bias", None)) is not None:
            output = output + bias[experts.clamp(max=module.num_experts - 1)]
        if name in updates:
            output = updates[name].add(output, x, offsets=offsets, tokens=tokens)
        return own(output)

    of_rows, on_inputs = weights.reshape(-1)[order, None], scales_inputs(module)

    def inputs() -> Tensor:
        rows = own(hidden[tokens])
        # Rounded first: engines get them in the dtype of the experts.
        return rows.to(module.gate_up_proj.dtype) * of_rows if on_inputs else rows

    output = product("down_proj", module._apply_gate(product("gate_up_proj", inputs())))
    weighted = output if on_inputs else output * of_rows
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return weighted[positions].view(num_tokens, top_k, -1).sum(1).to(hidden.dtype)


def grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [S, I] times the transposed weight [E, O, I] of each row's expert: [S, O]."""
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weights of experts are [E, I, O], not [E, O, I]."""
    return getattr(module, "is_transposed", False)


def scales_inputs(module: nn.Module) -> bool:
    """Whether weights multiply the inputs of experts (Llama 4), not their outputs."""
    return getattr(module, "scales_inputs", False)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts, by name, whose weights are 3-D parameters."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts")
        and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    }


def check_adaptable(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError unless adapters of these experts compute here what they do in PEFT."""
    for module in modules:
        own = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
        biases = {f"{name}_bias": 2 for name in EXPERT_WEIGHTS} if len(own) > 2 else {}
        is_plain = own == {**dict.fromkeys(EXPERT_WEIGHTS, 3), **biases}
        is_plain = is_plain and not getattr(module, "has_post_expert_norm", False)
        # PEFT takes the weights of Llama 4's experts, whose inputs are scaled, for [E, O, I].
        if not is_plain or not hasattr(module, "_apply_gate") or scales_inputs(module):
            raise ConfigError(
                f"[lora] cannot adapt {type(module).__name__}, whose weights have another layout;"
                " list the linear layers to adapt in lora.target_modules."
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
        given = factors_of(tensors, layer, dora=self.is_dora)
        a, b, *magnitude = (x.to(weight.device, dtype, non_blocking=True) for x in given)
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
    modules = expert_modules(model)
    experts = {n: m for n, m in modules.items() if any(c.startswith(f"{n}.") for c in chosen)}
    check_adaptable(experts.values())
    if experts and lora.dora:
        raise ConfigError(
            "lora.dora = true cannot adapt experts; list the linear layers to adapt in"
            " lora.target_modules, or set it to false."
        )
    return {name: shape for name, shape in layers.items() if name in chosen}


def describe_layers(layers: Mapping[str, tuple[int, ...]], *, rank: int) -> str:
    """What an adapter of these layers trains, in a sentence; `layers` as of adapted_layers()."""
    experts = {name.rpartition(".")[0]: s[0] for name, s in layers.items() if len(s) == 3}
    num_linear = sum(len(shape) == 2 for shape in layers.values())
    parts = [f"{num_linear} linear layers"] if num_linear else []
    if experts:
        parts.append(f"{sum(experts.values())} experts in {len(experts)} layers")
    weights = sum(math.prod(s[:-2]) * rank * sum(s[-2:]) for s in layers.values())
    return f"LoRA of rank {rank} adapts {' and '.join(parts)}; it has {weights:,} weights."


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
