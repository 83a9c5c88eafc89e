"""Projections of one input (query, key and value; gate and up) as one matrix product.

Their weights are views of one tensor under their old names, so weights are still swapped in place.

I and O = input and output size of a product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.fp8_layers import Fp8Linear, Fp8Matrix
from millrace.inference.embedded.fp8 import FP8

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


def is_product(projection: nn.Module) -> bool:
    """Whether fused_slice_of() knows this kind of projection."""
    return type(projection) in (nn.Linear, Fp8Linear, _LayerPart)


def fused_slice_of(
    projection: nn.Module,
) -> tuple[nn.Linear | Fp8Linear | FusedLinear, int, int]:
    """The product that computes a projection, and the projection's rows start..stop of it."""
    if isinstance(projection, _LayerPart):
        return projection.fused, projection.start, projection.stop
    assert isinstance(projection, nn.Linear | Fp8Linear)
    return projection, 0, projection.out_features


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
