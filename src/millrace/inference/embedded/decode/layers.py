"""Makes a transformers model decode fast without changing what it computes.

Two things happen to each decoder layer. Projections of one input (query, key and value; gate and
up) become slices of one matrix product: their weights are views of one tensor, under their old
names, so weights are still swapped in place, one by one. And passes run a compiled version of the
layer, in which everything between the matrix products is fused; all layers of one kind share the
compiled program.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.inference.embedded.decode.attention import DecodeLayer
from millrace.inference.embedded.decode.prefill import PrefillLayer
from millrace.inference.embedded.lora.side_products import UnmergedLora, frozen

_SHORT_PREFILL = 8  # tokens; compiled code would be made anew for a pass of one
# Called one after the other, in this order, with the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear:
    """One matrix product for several projections of one input."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        # Parameters, because torch.compile takes their shapes for constants.
        self.weight = frozen(torch.cat([part.weight.detach() for part in parts]))
        self.bias = None
        if parts[0].bias is not None:
            self.bias = frozen(torch.cat([part.bias.detach() for part in parts]))
        self.side: UnmergedLora | None = None
        # Between the first part's call and the last one's.
        self.input: Tensor | None = None
        self.output: Tensor | None = None


class FusedSlice(NamedTuple):
    """Where a projection is computed: rows of a product, which may be all there are."""

    product: nn.Linear | FusedLinear
    start: int
    stop: int


class _LayerPart(nn.Module):
    """One of the projections; computes all of them if it is the first to see an input."""

    def __init__(self, fused: FusedLinear, *, start: int, stop: int, is_first: bool, is_last: bool):
        super().__init__()
        self.weight = frozen(fused.weight[start:stop])
        if fused.bias is not None:
            self.bias = frozen(fused.bias[start:stop])
        self._fused = fused
        self._start, self._stop = start, stop
        self._is_first, self._is_last = is_first, is_last

    @property
    def place(self) -> FusedSlice:
        return FusedSlice(self._fused, self._start, self._stop)

    def forward(self, x: Tensor) -> Tensor:
        fused = self._fused
        if self._is_first:
            cast = x.to(fused.weight.dtype)
            product = F.linear(cast, fused.weight, fused.bias)
            if fused.side is not None:
                product = fused.side.add(product, cast, fused.bias)
            fused.input, fused.output = x, product
        assert fused.input is x, "projections of one input are called one after the other"
        assert fused.output is not None
        output = fused.output
        if self._is_last:
            fused.input = fused.output = None
        return output[..., self._start : self._stop]


def fused_slice_of(projection: nn.Module) -> FusedSlice:
    if isinstance(projection, _LayerPart):
        return projection.place
    assert isinstance(projection, nn.Linear)
    return FusedSlice(projection, 0, projection.out_features)


def prepare(model: PreTrainedModel, caches: Mapping[int, Tensor], *, compile_layers: bool) -> None:
    """Make a model, loaded with PAGED_ATTENTION, ready for rounds; it is changed in place."""
    fuse_projections(model)
    keep_residual_in_float32(model)
    install(model, caches, compile_layers=compile_layers)


def fuse_projections(model: PreTrainedModel) -> None:
    """Replace sibling projections by parts of one matrix product, where they can be."""
    for module in list(model.modules()):
        for names in _SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if _can_fuse(parts):
                _join(module, names, parts)


def _can_fuse(parts: list[Any]) -> bool:
    if not all(type(part) is nn.Linear for part in parts):
        return False
    first = parts[0]
    return all(
        part.in_features == first.in_features
        and part.weight.dtype == first.weight.dtype
        and (part.bias is None) == (first.bias is None)
        for part in parts
    )


def _join(module: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    fused = FusedLinear(parts)
    start = 0
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        stop = start + part.out_features
        is_last = index == len(parts) - 1
        replacement = _LayerPart(
            fused, start=start, stop=stop, is_first=index == 0, is_last=is_last
        )
        setattr(module, name, replacement)
        start = stop


def keep_residual_in_float32(model: PreTrainedModel) -> None:
    """Add up what layers contribute in float32, whatever dtype they compute in.

    The trainer does so, because its weights are float32: with the same sums on both sides, most of
    the difference between engine and trainer logprobs is gone.
    """
    if model.dtype == torch.float32:
        return
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: output.float())
    dtype = model.dtype

    def as_experts(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].to(dtype), *inputs[1:])

    for module in model.base_model.modules():
        own = [parameter.ndim for parameter in module.parameters(recurse=False)]
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_as_weight)
        elif 3 in own:  # experts, side by side
            module.register_forward_pre_hook(as_experts)
        elif 2 in own and not isinstance(module, _LayerPart | nn.Embedding):
            # A router: what it says weighs the experts, and is a few numbers per token.
            module.float()


def _as_weight(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert isinstance(module, nn.Linear)
    return (inputs[0].to(module.weight.dtype), *inputs[1:])


def install(model: PreTrainedModel, caches: Mapping[int, Tensor], *, compile_layers: bool) -> None:
    """Let each decoder layer find its own cache, and run compiled if wanted.

    A pass hands every layer the same DecodeLayer or PrefillLayer, whose cache is the first one's.
    """
    programs: dict[type, _Programs] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            kind = type(layer)
            if kind not in programs:
                programs[kind] = _programs(kind.forward, compile_layers=compile_layers)
            layer.forward = _Dispatch(layer, programs[kind], cache=caches[_index(layer)])


class _Programs(NamedTuple):
    """A layer's forward for each kind of pass, to be called with the layer first."""

    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    short_prefill: Callable[..., Any]


def _programs(forward: Callable[..., Any], *, compile_layers: bool) -> _Programs:
    if not compile_layers:
        return _Programs(decode=forward, prefill=forward, short_prefill=forward)
    return _Programs(
        # Decode passes come in few sizes: the largest gets code of its own.
        decode=torch.compile(forward, fullgraph=True),
        prefill=torch.compile(forward, fullgraph=True, dynamic=True),
        short_prefill=forward,
    )


class _Dispatch:
    """A layer's forward: runs the program for the kind of pass at hand."""

    def __init__(self, layer: nn.Module, programs: _Programs, *, cache: Tensor) -> None:
        self._layer = layer
        self._own = layer.forward
        self._programs = programs
        self._cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        paged = kwargs.get("millrace_paged")
        if isinstance(paged, DecodeLayer):
            run = self._programs.decode
        elif isinstance(paged, PrefillLayer):
            is_short = len(paged.slot_mapping) < _SHORT_PREFILL
            run = self._programs.short_prefill if is_short else self._programs.prefill
        else:
            return self._own(*args, **kwargs)
        kwargs["millrace_paged"] = paged._replace(cache=self._cache)
        return run(self._layer, *args, **kwargs)


def _index(layer: nn.Module) -> int:
    """A decoder layer's number: that of the attention in it."""
    found: set[Any] = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    assert len(found) == 1, f"{type(layer).__name__} holds attention of layers {found}"
    return found.pop()
