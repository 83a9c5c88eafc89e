"""Triton kernels of exact mode: reductions of rows and matrix products.

A reduction has one program per row. Every tile of a product walks the inner dimension from its
begin to its end, 16 numbers per tensor core instruction, and no two programs share a sum. So
neither the number of rows nor the tile's size changes a result.

Imported on machines with CUDA only. T = rows, D = their length, I and O = input and output size,
E = experts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 4096  # of a row that is reduced
_FEW_ROWS = 512
_MANY_OUTPUTS = 4096
# Rows, outputs and inner numbers of a tile, warps and stages.
_SMALL, _MEDIUM, _LARGE = (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3)
_OF_EXPERTS = (64, 128, 64, 4, 3)


@triton.jit
def _norm_kernel(
    x,  # [T, D]
    gain,  # [D]
    out,  # [T, D]
    scales,  # [T] float32
    row_stride,
    epsilon,
    offset,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROUNDS: tl.constexpr,  # to the dtype of x before the gain
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    own = at < SIZE
    values = tl.load(x + row * row_stride + at, mask=own, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    normed = values * scale
    factor = tl.load(gain + at, mask=own, other=0.0).to(tl.float32) + offset
    if ROUNDS:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (normed * factor).to(out.dtype.element_ty), mask=own)
    tl.store(scales + row, scale)


class Norm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * (gain + offset) over the last dimension, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, offset: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        _norm_kernel[(len(rows),)](
            rows,
            gain,
            out,
            scales,
            rows.stride(0),
            epsilon,
            offset,
            SIZE=rows.shape[1],
            PAD=triton.next_power_of_2(rows.shape[1]),
            ROUNDS=offset == 0,
            num_warps=4 if rows.shape[1] > 512 else 1,
        )
        ctx.save_for_backward(x, gain, scales)
        ctx.offset = offset
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        x, gain, scales = ctx.saved_tensors
        grads = _norm_gradient(grad, x, gain, scales.view(*x.shape[:-1], 1), ctx.offset)
        return *grads, None, None


@torch.compile(dynamic=True)
def _norm_gradient(
    grad: Tensor, x: Tensor, gain: Tensor, scales: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    normed = x.float() * scales
    of_normed = grad.float() * (gain.float() + offset)
    along = (of_normed * normed).mean(-1, keepdim=True)
    of_gain = (grad.float() * normed).flatten(0, -2).sum(0)
    return ((of_normed - normed * along) * scales).to(x.dtype), of_gain.to(gain.dtype)


@triton.jit
def _reduce_kernel(x, out, row_stride, size, CHUNK: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """The sum of a row, or the logarithm of the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    best = -float("inf")
    if EXPONENTIAL:
        highest = tl.full([CHUNK], -float("inf"), tl.float32)
        for begin in range(0, size, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            part = tl.load(x + at, mask=at < size, other=-float("inf")).to(tl.float32)
            highest = tl.maximum(highest, part)
        best = tl.max(highest, 0)
    sums = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, size, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        if EXPONENTIAL:
            part = tl.load(x + at, mask=at < size, other=-float("inf")).to(tl.float32)
            sums += tl.exp(part - best)
        else:
            sums += tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    total = tl.sum(sums, 0)
    tl.store(out + row, best + tl.log(total) if EXPONENTIAL else total)


class _RowReduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_exponential: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        chunk = min(_CHUNK, triton.next_power_of_2(rows.shape[1]))
        shape = {"CHUNK": chunk, "EXPONENTIAL": is_exponential, "num_warps": 8}
        _reduce_kernel[(len(rows),)](rows, out, rows.stride(0), rows.shape[1], **shape)
        out = out.view(*x.shape[:-1], 1)
        ctx.save_for_backward(x, out)
        ctx.is_exponential = is_exponential
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        x, out = ctx.saved_tensors
        spread = grad.expand(x.shape)
        return (spread * (x - out).exp() if ctx.is_exponential else spread).to(x.dtype), None


def reduce(name: str, x: Tensor, *, keepdim: bool) -> Tensor:
    """ "mean" or "logsumexp" of the last dimension."""
    out = _RowReduction.apply(x, name == "logsumexp")
    out = out.to(x.dtype) if name == "logsumexp" else (out / x.shape[-1]).to(x.dtype)
    return out if keepdim else out.squeeze(-1)


@triton.jit
def _product_kernel(
    x,  # [T, I]
    weight,  # [E, O, I]
    out,  # [T, O]
    ends,  # [E] int32; of the experts' rows; None = one weight for all rows
    num_rows,
    num_out,
    x_stride,
    weight_stride,  # of an output
    expert_stride,
    num_experts,
    INNER: tl.constexpr,
    GROUPED: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    # Neighbouring programs share rows and weights in the cache.
    program = tl.program_id(0)
    num_tiles_t = tl.cdiv(num_rows, TILE_T) + (num_experts if GROUPED else 0)
    num_tiles_o = tl.cdiv(num_out, TILE_O)
    per_group = SWIZZLE * num_tiles_o
    first_t = program // per_group * SWIZZLE
    group_t = min(num_tiles_t - first_t, SWIZZLE)
    tile_t = first_t + program % per_group % group_t
    tile_o = program % per_group // group_t
    begin = tile_t * TILE_T
    end = num_rows
    if GROUPED:
        # Tiles of an expert begin with its first row; an expert has at most one partial tile.
        expert = 0
        start = 0
        stop = tl.load(ends)
        left = tile_t
        tiles = tl.cdiv(stop - start, TILE_T)
        while (expert < num_experts - 1) & (left >= tiles):
            left -= tiles
            expert += 1
            start = stop
            stop = tl.load(ends + expert)
            tiles = tl.cdiv(stop - start, TILE_T)
        if left >= tiles:
            return
        begin = start + left * TILE_T
        end = stop
        weight += expert.to(tl.int64) * expert_stride
    rows = begin + tl.arange(0, TILE_T)
    outs = tile_o * TILE_O + tl.arange(0, TILE_O)
    inner = tl.arange(0, TILE_I)
    is_row, is_out = rows < end, outs < num_out
    x += tl.where(is_row, rows, begin).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight += tl.where(is_out, outs, 0).to(tl.int64)[None, :] * weight_stride + inner[:, None]
    total = tl.zeros([TILE_T, TILE_O], tl.float32)
    for done in range(0, INNER, TILE_I):
        if INNER % TILE_I == 0:
            a = tl.load(x + done)
            b = tl.load(weight + done)
        else:
            a = tl.load(x + done, mask=(inner < INNER - done)[None, :], other=0.0)
            b = tl.load(weight + done, mask=(inner < INNER - done)[:, None], other=0.0)
        total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
    place = out + rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def product(x: Tensor, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x [T, I] times the transposed weight [O, I]."""
    is_small = len(x) <= _FEW_ROWS
    x = x if is_small else x.to(weight.dtype)
    small = _MEDIUM if len(weight) >= _MANY_OUTPUTS else _SMALL
    return _launch(x, weight[None], None, dtype=dtype, tile=small if is_small else _LARGE)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [T, I], sorted by expert, times the transposed weight [E, O, I] of each row's expert."""
    return _launch(x, weight, ends.int(), dtype=x.dtype, tile=_OF_EXPERTS)


def _launch(
    x: Tensor, weight: Tensor, ends: Tensor | None, *, dtype: torch.dtype, tile: tuple[int, ...]
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(2) == 1 else weight.contiguous()
    num_experts, num_out, num_in = weight.shape
    tile_t, tile_o, tile_i, warps, stages = tile
    out = torch.empty(len(x), num_out, dtype=dtype, device=x.device)
    num_tiles = triton.cdiv(len(x), tile_t) + (0 if ends is None else num_experts)
    _product_kernel[(num_tiles * triton.cdiv(num_out, tile_o),)](
        x,
        weight,
        out,
        ends,
        len(x),
        num_out,
        x.stride(0),
        weight.stride(1),
        weight.stride(0),
        num_experts,
        INNER=num_in,
        GROUPED=ends is not None,
        TILE_T=tile_t,
        TILE_O=tile_o,
        TILE_I=tile_i,
        SWIZZLE=8,
        num_warps=warps,
        num_stages=stages,
    )
    return out
