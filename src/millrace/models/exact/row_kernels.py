"""Triton kernels of exact mode: reductions of rows, one program per row.

Imported on machines with CUDA only. T = rows, D = their length.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 4096


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
