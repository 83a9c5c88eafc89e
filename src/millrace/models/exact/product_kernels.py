"""Triton kernels of exact mode: matrix products in one order along the inner dimension.

Every tile of the output walks the inner dimension from its begin to its end, 16 numbers per tensor
core instruction, and no two programs share a sum. So neither the number of rows nor the tile's size
changes a result. Imported on machines with CUDA only.

T = rows, I and O = input and output size, E = experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW_ROWS = 512
_EXPERT_TILE = 64  # rows


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


# Rows, outputs and inner numbers of a tile, warps and stages.
SMALL, MEDIUM, LARGE = (64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3)
_MANY_OUTPUTS = 4096


def product(x: Tensor, weight: Tensor, *, dtype: torch.dtype, tile: tuple[int, ...] = ()) -> Tensor:
    """x [T, I] times the transposed weight [O, I]."""
    is_small = len(x) <= _FEW_ROWS
    x = x if is_small else x.to(weight.dtype)
    small = MEDIUM if len(weight) >= _MANY_OUTPUTS else SMALL
    tile = tile or (small if is_small else LARGE)
    return _launch(x, weight[None], None, dtype=dtype, tile=tile)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [T, I], sorted by expert, times the transposed weight [E, O, I] of each row's expert."""
    return _launch(x, weight, ends.int(), dtype=x.dtype, tile=(_EXPERT_TILE, 128, 64, 4, 3))


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
