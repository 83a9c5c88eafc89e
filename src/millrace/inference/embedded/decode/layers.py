"""Changes a transformers model so that it decodes faster and computes the same.

Projections of one input (query, key and value; gate and up) become slices of one matrix product.
Their weights are views of one tensor under their old names, so weights are still swapped in place.
Decoder layers run compiled: everything between the matrix products is fused, and all layers of one
class share the compiled program.

Experts on CUDA have kernels of their own for few rows, and grouped products for many: one opaque
operator decides by the number of rows, so that compiled layers serve both.

T = rows of the pass, I and O = input and output size of a product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from millrace.inference.embedded.decode import attention
from millrace.inference.embedded.decode.fp8_layers import Fp8Linear, Fp8Matrix
from millrace.inference.embedded.fp8 import FP8
from millrace.models.lora import factors
from millrace.models.sharding import router_modules

_Forward = Callable[..., Any]  # a layer's forward; the first argument is the layer
_SHORT_PREFILL = 8  # tokens; torch.compile would recompile for a pass of one token
_MAX_PROGRAMS = 64  # of a class of layers
_TILE = 64  # sizes of experts that their kernels compute are multiples of it
# Called one after another, in this order, with the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter, because torch.compile treats its shape as constant."""
    return nn.Parameter(tensor, requires_grad=False)


def add_side(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook: adds what the AdaptedProduct `side` of a layer adds."""
    return linear.side.add(output, inputs[0], linear.bias)


class FusedLinear:
    """One matrix product for several projections of one input."""

    def __init__(self, parts: list[Any]) -> None:
        """`parts`: linear layers of torch, or Fp8Linear."""
        weights = [part.weight.detach() for part in parts]
        self.dtype = weights[0].dtype  # of the output
        self.matrix: Fp8Matrix | None = None  # in FP8
        if self.dtype == FP8:
            whole = torch.cat([weight.view(torch.uint8) for weight in weights]).view(FP8)
            self.matrix = Fp8Matrix(whole, torch.cat([part.row_scales for part in parts]))
            self.dtype, self.weight = parts[0].dtype, self.matrix.weight
        else:
            self.weight = frozen(torch.cat(weights))
        self.bias = None
        if parts[0].bias is not None:
            self.bias = frozen(torch.cat([part.bias.detach() for part in parts]))
        self.side: Any = None  # an AdaptedProduct
        # Set between the call of the first part and that of the last one.
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def multiply(self, x: Tensor) -> Tensor:
        cast = x.to(self.dtype)
        if self.matrix is None:
            product = F.linear(cast, self.weight, self.bias)
        else:
            product = self.matrix.multiply(x, self.bias, dtype=self.dtype)
        return product if self.side is None else self.side.add(product, cast, self.bias)


class _LayerPart(nn.Module):
    """One of the projections; the first one computes all of them."""

    def __init__(self, fused: FusedLinear, *, start: int, stop: int, is_first: bool, is_last: bool):
        super().__init__()
        self.weight = frozen(fused.weight[start:stop])
        self.row_scales: Tensor | None = None  # of an FP8 weight
        if fused.matrix is not None:
            self.row_scales = fused.matrix.scales.detach()[start:stop]
        if fused.bias is not None:
            self.bias = frozen(fused.bias[start:stop])
        self.fused = fused
        self.start, self.stop = start, stop
        self._is_first, self._is_last = is_first, is_last

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused
        if self._is_first:
            fused.input, fused.output = x, fused.multiply(x)
        assert fused.input is x, "projections of one input are called one after another"
        assert fused.output is not None
        output = fused.output
        if self._is_last:
            fused.input = fused.output = None
        return output[..., self.start : self.stop]


def row_scales_of(model: nn.Module) -> dict[str, Tensor]:
    """The scales [O, 1] of FP8 weights, by the names of the weights."""
    return {
        f"{name}.weight": module.row_scales
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear | _LayerPart) and module.row_scales is not None
    }


def fused_slice_of(
    projection: nn.Module,
) -> tuple[nn.Linear | Fp8Linear | FusedLinear, int, int]:
    """The product that computes a projection, and the projection's rows start..stop of it."""
    if isinstance(projection, _LayerPart):
        return projection.fused, projection.start, projection.stop
    assert isinstance(projection, nn.Linear | Fp8Linear)
    return projection, 0, projection.out_features


def prepare(model: PreTrainedModel, caches: Mapping[int, Tensor], *, compile_layers: bool) -> None:
    """Change a model, loaded with PAGED_ATTENTION, in place for the decode loop."""
    fuse_projections(model)
    if model.device.type == "cuda":
        use_expert_kernels(model)
    install(model, caches, compile_layers=compile_layers)


def fuse_projections(model: PreTrainedModel) -> None:
    """Replace sibling projections by parts of one matrix product, where possible."""
    for module in list(model.modules()):
        for names in _SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if not all(type(part) in (nn.Linear, Fp8Linear) for part in parts):
                continue
            kinds = {(part.in_features, part.weight.dtype, part.bias is None) for part in parts}
            if len(kinds) > 1:
                continue
            fused, stop = FusedLinear(parts), 0
            for name, part in zip(names, parts, strict=True):
                start, stop = stop, stop + part.out_features
                ends = {"is_first": name == names[0], "is_last": name == names[-1]}
                setattr(module, name, _LayerPart(fused, start=start, stop=stop, **ends))


def keep_residual_in_float32(model: PreTrainedModel) -> None:
    """Sum the outputs of layers in float32, in any compute dtype. The trainer does so, because its
    weights are float32. The same sums on both sides remove most of the difference between engine
    and trainer logprobs. Routers compute in float32 on both sides."""
    # AltUp of Gemma 3n multiplies the sums by outputs of linear layers, which have its dtype.
    if model.dtype == torch.float32 or model.config.get_text_config().model_type == "gemma3n_text":
        return
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: output.float())
    dtype = model.dtype

    def as_experts(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].to(dtype), *inputs[1:])

    for router in router_modules(model):
        router.float()
    for module in model.base_model.modules():
        if isinstance(module, nn.LayerNorm):  # it takes inputs of its own dtype only
            module.float()
        elif isinstance(module, nn.Linear | Conv1D):
            module.register_forward_pre_hook(_as_weight)
        elif any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(as_experts)


def _as_weight(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].to(module.weight.dtype), *inputs[1:])


def install(model: PreTrainedModel, caches: Mapping[int, Tensor], *, compile_layers: bool) -> None:
    """Give each decoder layer its own cache, and run it compiled if wanted. A pass gives all layers
    the same DecodeLayer or PrefillLayer, with the cache of the first."""
    programs: dict[type, tuple[_Forward, _Forward]] = {}
    if compile_layers:
        # The programs of a class count together: decoding and prefill, with and without a window
        # and a cached context, for one size and for all. With windows, these are more than 8.
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MAX_PROGRAMS)
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer) or (number := _index(layer)) is None:
            continue
        kind = type(layer)
        if kind not in programs:
            decode = prefill = kind.forward
            if compile_layers:
                # Decode passes come in few sizes, and the first one gets a program of its own.
                decode = torch.compile(kind.forward, fullgraph=True)
                prefill = torch.compile(kind.forward, fullgraph=True, dynamic=True)
            programs[kind] = decode, prefill
        layer.forward = _Dispatch(layer, layer.forward, *programs[kind], cache=caches[number])


@dataclass(frozen=True, slots=True, eq=False)
class _Dispatch:
    """A layer's forward: runs the program for the kind of pass at hand."""

    layer: nn.Module
    own: _Forward
    decode: _Forward
    prefill: _Forward
    cache: Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        paged = kwargs.get("millrace_paged")
        if isinstance(paged, attention.DecodeLayer):
            run = self.decode
        elif isinstance(paged, attention.PrefillLayer):
            is_short = len(paged.slot_mapping) < _SHORT_PREFILL
            run = type(self.layer).forward if is_short else self.prefill
        else:
            return self.own(*args, **kwargs)
        kwargs["millrace_paged"] = paged._replace(cache=self.cache)
        return run(self.layer, *args, **kwargs)


def _index(layer: nn.Module) -> int | None:
    """The number of a decoder layer, from its attention; None for layers of other parts."""
    found: set[Any] = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    assert len(found) <= 1, f"{type(layer).__name__} holds attention of layers {found}"
    return found.pop() if found else None


def use_expert_kernels(model: PreTrainedModel) -> None:
    """Make experts that the kernels can compute use them."""
    for module in factors.expert_modules(model).values():
        if _can_use_kernels(module):
            # One function for all layers: torch.compile would build a program for each closure.
            module.forward = MethodType(_experts_forward, module)


def _can_use_kernels(module: Any) -> bool:
    own = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
    if own != dict.fromkeys(factors.EXPERT_WEIGHTS, 3) or factors.is_transposed(module):
        return False
    gate = getattr(module, "_apply_gate", None)
    is_default = getattr(gate, "__module__", "") == "transformers.integrations.moe"
    is_silu = isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
    if not is_default or not is_silu or getattr(module, "has_post_expert_norm", False):
        return False
    weight = module.down_proj
    return weight.dtype != torch.float32 and not any(n % _TILE for n in weight.shape[1:])


def _experts_forward(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    matrices = (module.gate_up_proj, module.down_proj)
    return torch.ops.millrace.experts(hidden, indices, weights, *matrices)


def _experts_on_cuda(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    from millrace.inference.embedded.decode import expert_kernels

    if indices.numel() <= expert_kernels.MAX_ROWS:
        return expert_kernels.experts(hidden, indices, weights, gate_up, down)
    return plain_experts(hidden, indices, weights, gate_up, down)


def plain_experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:  # [T, I]
    """The same by grouped products, on any device."""
    module = SimpleNamespace(
        num_experts=len(down),
        gate_up_proj=gate_up,
        down_proj=down,
        expert_updates={},
        _apply_gate=_gated,
    )
    return factors.forward_with_lora(module, hidden, indices, weights)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


attention.define_operator(
    "experts(Tensor hidden, Tensor indices, Tensor weights, Tensor gate_up, Tensor down) -> Tensor",
    cuda=_experts_on_cuda,
    cpu=plain_experts,
    shape=lambda hidden, *_: torch.empty_like(hidden),
)
