"""Changes a transformers model so that it decodes faster and computes the same.

Projections of one input become slices of one matrix product (fused_linear.py). The layers of common
models run by kernels of their own (fused_layers.py). Those of others run compiled: everything
between the matrix products is fused, and all layers of one class share the compiled program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from millrace.inference.embedded.decode.attention import DecodeLayer, PrefillLayer
from millrace.inference.embedded.decode.experts import use_expert_kernels
from millrace.inference.embedded.decode.fused_layers import FusedModel, can_fuse
from millrace.inference.embedded.decode.fused_linear import fuse_projections
from millrace.models.attention.layout import ScoreRules
from millrace.models.sharding import router_modules

_Forward = Callable[..., Any]  # a layer's forward; the first argument is the layer
_SHORT_PREFILL = 8  # tokens; torch.compile would recompile for a pass of one token
_MAX_PROGRAMS = 64  # of a class of layers


def prepare(
    model: PreTrainedModel,
    caches: Mapping[int, Tensor],
    rules: Mapping[int, ScoreRules],
    *,
    max_context: int,
    fast: bool,
    has_adapters: bool,
) -> None:
    """Change a model, loaded with PAGED_ATTENTION, in place for the decode loop. `caches` and
    `rules` of attention by layer. `fast`: by kernels of Millrace, or else by torch.compile on a
    GPU. `has_adapters`: some adapters are not merged."""
    fuse_projections(model)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        use_expert_kernels(model)
    if fast and not has_adapters and can_fuse(model, rules):
        base: Any = model.base_model
        base.forward = FusedModel(model, caches, rules, max_context=max_context).forward
    else:
        install(model, caches, compile_layers=fast and on_gpu)


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
        if isinstance(paged, DecodeLayer):
            run = self.decode
        elif isinstance(paged, PrefillLayer):
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
