"""Triton kernels of exact mode: reductions of rows, matrix products and attention, in one order.

A reduction has one program per row. Every tile of a product walks the inner dimension from its
begin to its end, 16 numbers per tensor core instruction, and no two programs share a sum. So
neither the number of rows nor the tile's size changes a result.

An attention program computes some queries of a tile, for the query heads that share a KV head. It
is one warp with 16 rows in decode steps, prefill and training alike: several warps would divide the
keys of a block among them, and sum in another order. See exact/attention.py for its shapes.

Imported on machines with CUDA only. T = rows, D = their length, I and O = input and output size.
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
_KEYS = 64  # of a block of attention
_ROWS = 16  # of a program of attention


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
    """x / sqrt(mean(x^2) + epsilon) * (gain + offset) over the last dimension, computed in float32;
    in the dtype of the gain, to which products would round it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, offset: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty(rows.shape, dtype=gain.dtype, device=x.device)
        scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        size = rows.shape[1]
        shape = {"SIZE": size, "PAD": triton.next_power_of_2(size), "ROUNDS": offset == 0}
        tensors, warps = (rows, gain, out, scales), 4 if size > 512 else 1
        _norm_kernel[(len(rows),)](
            *tensors, rows.stride(0), epsilon, offset, **shape, num_warps=warps
        )
        ctx.save_for_backward(x, gain, scales)
        ctx.offset = offset
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
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
    sizes = (len(x), num_out, x.stride(0), weight.stride(1), weight.stride(0), num_experts)
    tiles = {"TILE_T": tile_t, "TILE_O": tile_o, "TILE_I": tile_i, "SWIZZLE": 8}
    options = {"GROUPED": ends is not None, "num_warps": warps, "num_stages": stages}
    _product_kernel[(num_tiles * triton.cdiv(num_out, tile_o),)](
        x, weight, out, ends, *sizes, INNER=num_in, **tiles, **options
    )
    return out


@triton.jit
def _attend_kernel(
    query,  # [T, H, D]
    key,  # [slots, K, D]
    value,  # [slots, K, E]
    out,  # [T, H, E]
    lse,  # [H, T] float32
    sequences,
    tile_rows,
    counts,
    positions,
    entries,
    offsets,
    scale,
    window,  # 0 = none
    num_rows,
    query_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEADS: tl.constexpr,  # H
    GROUP: tl.constexpr,  # G
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,  # of a program
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    skipped = part * QUERIES
    count = tl.load(counts + tile).to(tl.int32) - skipped
    if (count <= 0) & (part > 0):
        return
    row = tl.load(tile_rows + tile) + skipped
    first = tl.load(positions + tile).to(tl.int32) + skipped
    sequence = tl.load(sequences + tile)
    table = entries + tl.load(offsets + sequence)
    lines = tl.arange(0, QUERIES * GROUP_PAD)
    number, member = lines // GROUP_PAD, lines % GROUP_PAD
    own = (number < tl.maximum(count, 1)) & (member < GROUP)  # an idle tile gets zeros
    heads = head * GROUP + member
    key_dim, value_dim = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    q = tl.load(
        query
        + (row + number)[:, None] * query_stride
        + heads[:, None] * KEY_DIM
        + key_dim[None, :],
        mask=own[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    at_query = first + number
    stop = first + tl.minimum(count, QUERIES)  # of the keys; an idle tile has none
    start = 0
    if window > 0:
        start = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    best = tl.full([QUERIES * GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    acc = tl.zeros([QUERIES * GROUP_PAD, VALUE_PAD], tl.float32)
    for begin in tl.range(start, stop, KEYS):
        at = begin + tl.arange(0, KEYS)
        live = at < stop
        block = tl.load(table + at // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)
        slot = block * BLOCK_TOKENS + at % BLOCK_TOKENS
        k = tl.load(
            key + slot[None, :] * key_stride + head * key_head_stride + key_dim[:, None],
            mask=live[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            value + slot[:, None] * value_stride + head * value_head_stride + value_dim[None, :],
            mask=live[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        seen = at[None, :] <= at_query[:, None]
        if window > 0:
            seen = seen & (at[None, :] > at_query[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)  # a row that saw no key yet
        shrink = tl.exp2(best - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + ((row + number)[:, None] * HEADS + heads[:, None]) * VALUE_DIM
    tl.store(
        place + value_dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=own[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    natural = (best + tl.log2(total)) * 0.6931471805599453  # scores are base-2 logarithms
    tl.store(lse + heads * num_rows + row + number, natural, mask=own)


@triton.jit
def _store_kernel(cache, slots, rows, SIZE: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.arange(0, PAD)
    own = (at < SIZE) & (slot >= 0)
    tl.store(cache + slot * SIZE + at, tl.load(rows + row * SIZE + at, mask=own), mask=own)


def store(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    size = rows[0].numel()
    shape = {"SIZE": size, "PAD": triton.next_power_of_2(size)}
    _store_kernel[(len(rows),)](cache, slots, rows.contiguous(), **shape)


def attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: Any, rules: Any
) -> tuple[Tensor, Tensor]:
    """Output [T, H, E] and the log-sum-exp of scores [H, T] float32."""
    assert rules.softcap is None, "checked when the model is loaded"
    num_rows, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    query = query.contiguous()
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    assert group <= _ROWS, "checked when the model is loaded"
    queries = _ROWS // padded
    out = query.new_empty(num_rows, num_heads, value_dim)
    lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=query.device)
    grid = (len(tiles.rows), num_kv_heads, triton.cdiv(tiles.size, queries))
    tensors = (query, key, value, out, lse, *tiles[:4], *tiles.tables[:2])
    limits = (rules.scale * 1.4426950408889634, rules.window or 0, num_rows)
    heads = {"HEADS": num_heads, "GROUP": group, "GROUP_PAD": padded, "QUERIES": queries}
    _attend_kernel[grid](
        *tensors,
        *limits,
        query.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        **heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_TOKENS=tiles.tables.block_tokens,
        KEYS=_KEYS,
        num_warps=1,
        num_stages=2,
    )
    return out, lse
