"""Triton kernels of decoder layers: what lies between their matrix products, and the products of
few rows.

A step of a small batch is made of launches and of reading weights. So the sum with the residual
stream and the norm after it are one kernel; rotary embedding is part of decode attention; and for
few rows, products read each weight once, apply the activation themselves, or leave the sum of
their parts to the next norm.

Sums are float32. Each function computes what the one of the same name in fused_layers.py computes.

Imported on machines with CUDA only. T = rows, I and O = input and output size of a product, H =
size of the residual stream, P = parts of a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.decode.kernels.overlap_kernels import (
    begin_kernel,
    overlap_options,
    prefetch,
)
from millrace.inference.embedded.decode.tilings import Tiling, program_rows
from millrace.inference.embedded.fp8 import FP8

_LINE_BYTES = 128
_AHEAD_LINES = 8  # of each row of the weights
_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def _store_row(out, scales, row, at, is_inside, value, SIZE: tl.constexpr, IS_FP8: tl.constexpr):
    """Store a row, in FP8 with its scale."""
    if IS_FP8:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / _LARGEST_FP8
        tl.store(scales + row, scale)
        value = value / scale
    place = out + row.to(tl.int64) * SIZE + at
    tl.store(place, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _add_norm_kernel(
    residual,  # [T, H] float32; written if there are parts
    parts,  # [P, T, H], or anything without parts
    weight,  # [H]
    out,  # [T, H]
    scales,  # [T, 1] float32, of an output in FP8
    part_stride,
    row_stride,  # of parts
    eps,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    row = tl.program_id(0)
    at = tl.arange(0, PAD)
    is_inside = at < SIZE
    gain = tl.load(weight + at, mask=is_inside, other=0.0).to(tl.float32)
    line = residual + row.to(tl.int64) * SIZE + at
    value = tl.load(line, mask=is_inside, other=0.0)
    if NUM_PARTS > 0:
        part = parts + row.to(tl.int64) * row_stride + at
        for number in tl.static_range(NUM_PARTS):
            summand = tl.load(part + number * part_stride, mask=is_inside, other=0.0)
            value += summand.to(tl.float32)
        tl.store(line, value, mask=is_inside)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    _store_row(out, scales, row, at, is_inside, value * inverse * gain, SIZE, IS_FP8)


@triton.jit
def _gate_kernel(
    both,  # [T, 2 M]; gate, up
    out,  # [T, M]
    scales,
    SIZE: tl.constexpr,  # M
    PAD: tl.constexpr,
    IS_FP8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    row = tl.program_id(0)
    at = tl.program_id(1) * PAD + tl.arange(0, PAD)
    is_inside = at < SIZE
    gates = both + row.to(tl.int64) * (2 * SIZE) + at
    gate = tl.load(gates, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=is_inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    _store_row(out, scales, row, at, is_inside, value, SIZE, IS_FP8)


@triton.jit
def _quantize_kernel(x, out, scales, SIZE: tl.constexpr, PAD: tl.constexpr, OVERLAPS: tl.constexpr):
    begin_kernel(OVERLAPS)
    row = tl.program_id(0)
    at = tl.arange(0, PAD)
    value = tl.load(x + row.to(tl.int64) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    _store_row(out, scales, row, at, at < SIZE, value, SIZE, True)


@triton.jit
def _product_kernel(
    x,  # [T, I]
    weight,  # [O, I]; gated [2 O, I], gates first
    x_scales,  # [T, 1] float32, in FP8
    weight_scales,  # [O, 1] float32, in FP8
    bias,  # [O], with HAS_BIAS
    out,  # [P, T, O]
    num_rows,
    depth,  # of I, per part
    num_in,
    num_out,
    IS_GATED: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LINE: tl.constexpr,  # numbers of a cache line
    LINES: tl.constexpr,  # that are fetched ahead
    OVERLAPS: tl.constexpr,
):
    # Programs of the same columns are neighbours, so that they read the weights once.
    num_blocks = tl.cdiv(num_rows, ROWS)
    part, place = tl.program_id(1), tl.program_id(0)
    columns = (place // num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (place % num_blocks) * ROWS + tl.arange(0, ROWS)
    at = part * depth + tl.arange(0, DEPTH)
    if OVERLAPS:
        lines = part * depth + tl.minimum(tl.arange(0, LINES) * LINE, depth - 1)
        ahead = weight + tl.minimum(columns, num_out - 1).to(tl.int64)[:, None] * num_in
        prefetch(ahead + lines[None, :])
        if IS_GATED:
            prefetch(ahead + num_out * num_in + lines[None, :])
    begin_kernel(OVERLAPS)
    is_row = (rows < num_rows)[:, None]
    is_column = columns < num_out
    line = x + rows[:, None] * num_in + at[None, :]
    matrix = weight + columns.to(tl.int64)[None, :] * num_in + at[:, None]
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        a = tl.load(line + begin, mask=is_row, other=0.0)
        b = tl.load(matrix + begin, mask=is_column[None, :], other=0.0)
        # Of float32, three products of tensor cores are as exact as one of float32.
        product = tl.dot(a, b, product, input_precision="tf32x3")
        if IS_GATED:
            ups = matrix + num_out * num_in + begin
            b = tl.load(ups, mask=is_column[None, :], other=0.0)
            up = tl.dot(a, b, up, input_precision="tf32x3")
    if IS_FP8:
        row_scale = tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
        scale = tl.load(weight_scales + columns, mask=is_column, other=0.0)[None, :]
        product *= row_scale * scale
        if IS_GATED:
            scale = tl.load(weight_scales + num_out + columns, mask=is_column, other=0.0)[None, :]
            up *= row_scale * scale
    if HAS_BIAS:
        product += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        product = product * tl.sigmoid(product) * up
    target = out + (part * num_rows + rows).to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


def router_scores(hidden: Tensor, weight: Tensor) -> Tensor:  # [P, T, O]
    """The product of hidden [T, I] and weight [O, I], both float32, in parts."""
    num_in = weight.shape[1]
    num_parts = next(n for n in (16, 8, 4, 2, 1) if num_in % (32 * n) == 0)
    tiling = Tiling(16, 32, num_parts, rows=program_rows(len(hidden)))
    return product((hidden, None), (weight, None), dtype=torch.float32, tiling=tiling)


def add_norm(
    residual: Tensor, parts: Tensor | None, weight: Tensor, *, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    num_rows, size = residual.shape
    out, scales = _empty_rows(num_rows, size, dtype=dtype, device=residual.device)
    pad = triton.next_power_of_2(size)
    _add_norm_kernel[(num_rows,)](
        residual,
        residual if parts is None else parts,
        weight,
        out,
        scales,
        *((0, 0) if parts is None else parts.stride()[:2]),
        eps,
        SIZE=size,
        PAD=pad,
        NUM_PARTS=0 if parts is None else len(parts),
        IS_FP8=dtype == FP8,
        num_warps=_num_warps(pad),
        **overlap_options(),
    )
    return out, scales


def gate(both: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    num_rows, size = both.shape[0], both.shape[1] // 2
    out, scales = _empty_rows(num_rows, size, dtype=dtype, device=both.device)
    # In FP8, a program finds the scale of its whole row.
    pad = triton.next_power_of_2(size) if dtype == FP8 else 1024
    _gate_kernel[(num_rows, triton.cdiv(size, pad))](
        both,
        out,
        scales,
        SIZE=size,
        PAD=pad,
        IS_FP8=dtype == FP8,
        num_warps=_num_warps(pad),
        **overlap_options(),
    )
    return out, scales


def quantize(x: Tensor) -> tuple[Tensor, Tensor | None]:
    num_rows, size = x.shape
    out, scales = _empty_rows(num_rows, size, dtype=FP8, device=x.device)
    pad = triton.next_power_of_2(size)
    sizes = {"SIZE": size, "PAD": pad, "num_warps": _num_warps(pad)}
    _quantize_kernel[(num_rows,)](x, out, scales, **sizes, **overlap_options())
    return out, scales


def product(
    x: tuple[Tensor, Tensor | None],  # [T, I], and scales [T, 1] in FP8
    weight: tuple[Tensor, Tensor | None],  # [O, I], and scales [O, 1] in FP8
    *,
    bias: Tensor | None = None,  # [O]
    is_gated: bool = False,
    dtype: torch.dtype,
    tiling: Tiling,
) -> Tensor:  # [P, T, O]; gated [1, T, O / 2]
    (values, x_scales), (matrix, weight_scales) = x, weight
    num_rows, num_in = values.shape
    num_out = len(matrix) // 2 if is_gated else len(matrix)
    depth = num_in // tiling.num_parts
    assert depth % tiling.depth == 0
    assert bias is None or (tiling.num_parts == 1 and not is_gated)
    out = torch.empty(tiling.num_parts, num_rows, num_out, dtype=dtype, device=values.device)
    num_tiles = triton.cdiv(num_out, tiling.columns) * triton.cdiv(num_rows, tiling.rows)
    _product_kernel[(num_tiles, tiling.num_parts)](
        values,
        matrix,
        x_scales,
        weight_scales,
        bias,
        out,
        num_rows,
        depth,
        num_in,
        num_out,
        IS_GATED=is_gated,
        IS_FP8=x_scales is not None,
        HAS_BIAS=bias is not None,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        LINE=_LINE_BYTES // values.itemsize,
        LINES=_AHEAD_LINES // 2 if is_gated else _AHEAD_LINES,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap_options(),
    )
    return out


def _empty_rows(
    num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    out = torch.empty(num_rows, size, dtype=dtype, device=device)
    if dtype != FP8:
        return out, None
    return out, torch.empty(num_rows, 1, dtype=torch.float32, device=device)


def _num_warps(pad: int) -> int:
    return 4 if pad <= 2048 else 8
