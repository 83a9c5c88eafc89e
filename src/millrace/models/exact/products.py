"""Matrix products whose rows do not depend on each other.

On a CPU, rows are multiplied in tiles of a constant number, so the library uses one kernel for each
weight. On CUDA, one Triton kernel adds in the same order along the inner dimension for every number
of rows. Backward passes use the fastest product.

T = rows, I and O = input and output size, E = experts.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.core.errors import ConfigError

# Measured: with more rows or a larger inner dimension, threads may share the sum of a product.
_TILE = 16  # rows
_INNER = 256


def refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    """Refuse a model for a function or a part that has no exact version."""
    raise ConfigError(
        f"fidelity.mode = 'exact' does not support this model, which uses {name!r}: its result for"
        " a token may depend on the tokens beside it; set fidelity.mode to 'fast'."
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times the transposed weight [O, I]; in the dtype of the weight."""
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() or not x.is_cuda:  # otherwise the kernel rounds it
        rows = rows.to(weight.dtype)
    output = _Product.apply(rows, weight, weight.dtype).view(*x.shape[:-1], len(weight))
    return output if bias is None else output + bias


def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """a [T, I] times b [I, O], which is a transposed weight."""
    return _Product.apply(a, b.t(), out_dtype or a.dtype)


def grouped_product(x: Tensor, weight: Tensor, *, offs: Tensor, **_: None) -> Tensor:
    """x [T, I], sorted by expert, times the weight [E, I, O] of each row's expert. `offs` [E]: ends
    of the experts' rows."""
    if x.is_cuda:
        return _GroupedProduct.apply(x, weight, offs)
    ends = offs.tolist()
    parts = [
        _Product.apply(x[start:end], weight[expert].t(), x.dtype)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        if end > start
    ]
    return torch.cat(parts) if parts else x.new_empty(0, weight.shape[2])


class _Product(torch.autograd.Function):
    """(x [T, I], weight [O, I]) -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            from millrace.models.exact import product_kernels

            return product_kernels.product(x, weight, dtype=dtype)
        return _in_tiles(x.float(), weight.float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def _in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    if len(weight) == 1:  # a product with a vector has a kernel for each number of rows
        return _in_tiles(x, F.pad(weight, (0, 0, 0, 1)))[:, :1]
    num_tiles = -(-len(x) // _TILE)
    tiles = F.pad(x, (0, 0, 0, num_tiles * _TILE - len(x))).view(num_tiles, _TILE, -1)
    parts = zip(tiles.split(_INNER, 2), weight.t().split(_INNER), strict=True)
    total: Any = 0
    for part, factor in parts:
        total = total + torch.bmm(part, factor.expand(num_tiles, -1, -1))
    return total.flatten(0, 1)[: len(x)]


class _GroupedProduct(torch.autograd.Function):
    """(x [T, I], weight [E, I, O], ends [E]) -> [T, O], on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        from millrace.models.exact import product_kernels

        ctx.save_for_backward(x, weight, ends)
        return product_kernels.grouped(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, weight.transpose(1, 2), offs=ends)
        if ctx.needs_input_grad[1]:
            of_weight = F.grouped_mm(x.t(), grad, offs=ends)
        return of_x, of_weight, None
