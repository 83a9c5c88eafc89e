"""Triton kernels of decode attention: one query token per row over a paged KV cache.

Only live KV is read: a program walks the blocks of one row, one KV head and one split of its
context. All query heads that share the KV head are the rows of one matrix product. A second kernel
joins the splits of rows that have several, so that a few long rows occupy the GPU as well as many
short ones. There are no programs for splits that a row does not have.

Keys and values of an FP8 cache become float16, which represents them exactly, and so do the query
and the weights; scales of keys multiply scores, and scales of values the weights. Weights are
divided by the largest scale of the tile before they are rounded, so that none of them underflows.

Imported on machines with CUDA only. B = rows, H = query heads, K = KV heads, G = H / K,
D = head size of keys, E = of values, W = blocks per row in the table, S = splits of all rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.fp8 import FP8

_TILE = 64  # tokens that a program handles at a time
_JOINED = 16  # splits that are joined at a time


@triton.jit
def _attend_kernel(
    query,  # [B, H, D]
    key,  # [B, K, D]; of the newest token of each row
    value,  # [B, K, E]
    cache,  # [slots, K, WIDTH]; the newest token is stored there
    scales,  # float32; the same memory if IS_FP8, else unused
    tables,  # [B, W] int32
    lengths,  # [B] int64; 0 = the row is idle
    splits,  # [S, 4] int32, see splits.py
    out,  # [B, H, E]; of rows with one split
    parts,  # float32 [S, H, E]; of the others
    normalizers,  # float32 [S, H]; of these, log2 of the sum of exp2(scores)
    scale,  # of the scores, times log2(e) unless capped
    window,
    cap,
    sinks,  # [H]; unused without HAS_SINKS
    table_width,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # at least 16: the smallest matrix product
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    place = tl.program_id(1)
    row = tl.load(splits + place * 4)
    split = tl.load(splits + place * 4 + 1)
    num_splits = tl.load(splits + place * 4 + 2)
    if num_splits == 0:
        return
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    tiles = tl.cdiv(tl.cdiv(length - first, TILE), num_splits)
    start = first + split * tiles * TILE
    stop = tl.minimum(start + tiles * TILE, length)

    group = tl.arange(0, GROUP_PAD)
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    own = group < GROUP
    heads = head * GROUP + group
    part = tl.load(splits + place * 4 + 3).to(tl.int64) * (HEADS * GROUP) + heads
    if (split > 0) & (start >= length):
        tl.store(normalizers + part, tl.full([GROUP_PAD], -float("inf"), tl.float32), mask=own)
        return
    q = tl.load(
        query + row.to(tl.int64) * query_stride + heads[:, None] * KEY_DIM + key_dim[None, :],
        mask=own[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    if IS_FP8 and q.dtype != tl.float32:
        q = q.to(tl.float16)
    table = tables + row.to(tl.int64) * table_width
    if (start < stop) & (stop == length):
        # This split holds the newest token: store it before anything of the split is read.
        at = length - 1
        block = tl.load(table + at // BLOCK_TOKENS).to(tl.int64)
        slot = block * BLOCK_TOKENS + at % BLOCK_TOKENS
        entry = cache + (slot * HEADS + head) * WIDTH
        is_key, is_value = key_dim < KEY_DIM, value_dim < VALUE_DIM
        source = key + row.to(tl.int64) * key_stride + head * KEY_DIM + key_dim
        new_key = tl.load(source, mask=is_key, other=0.0)
        source = value + row.to(tl.int64) * value_stride + head * VALUE_DIM + value_dim
        new_value = tl.load(source, mask=is_value, other=0.0)
        if IS_FP8:
            new_key, new_value = new_key.to(tl.float32), new_value.to(tl.float32)
            key_scale = tl.maximum(tl.max(tl.abs(new_key), 0), 1e-12) / 448.0
            value_scale = tl.maximum(tl.max(tl.abs(new_value), 0), 1e-12) / 448.0
            scales_at = scales + (slot * HEADS + head) * (WIDTH // 4) + (WIDTH - 16) // 4
            tl.store(scales_at, key_scale)
            tl.store(scales_at + 1, value_scale)
            new_key, new_value = new_key / key_scale, new_value / value_scale
        tl.store(entry + key_dim, new_key.to(cache.dtype.element_ty), mask=is_key)
        value_at = entry + KEY_DIM + value_dim
        tl.store(value_at, new_value.to(cache.dtype.element_ty), mask=is_value)
        tl.debug_barrier()
    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:  # in one split
        sink = tl.load(sinks + heads, mask=own, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, total + 1.0, total)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    for begin in tl.range(start, stop, TILE):
        at = begin + tl.arange(0, TILE)
        live = at < stop
        block = tl.load(table + at // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)
        slot = block * BLOCK_TOKENS + at % BLOCK_TOKENS
        entry = cache + (slot * HEADS + head) * WIDTH
        k = tl.load(
            entry[None, :] + key_dim[:, None],
            mask=live[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            entry[:, None] + KEY_DIM + value_dim[None, :],
            mask=live[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        if IS_FP8:
            scales_of = scales + (slot * HEADS + head) * (WIDTH // 4) + (WIDTH - 16) // 4
            key_scales = tl.load(scales_of, mask=live, other=0.0)
            value_scales = tl.load(scales_of + 1, mask=live, other=0.0)
            k, v = k.to(q.dtype), v.to(q.dtype)
            scores = tl.dot(q, k, input_precision=PRECISION) * (key_scales * scale)[None, :]
        else:
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_CAP:
            # tanh by exp2; scores become base-2 logarithms here, without a cap they already are.
            squashed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634) / cap) + 1.0)
            scores = squashed * cap * 1.4426950408889634
        scores = tl.where(live[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if IS_FP8:
            largest = tl.max(value_scales, 0)
            weights = weights * (value_scales / largest)[None, :]
            attended = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) * largest
        else:
            attended = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        acc = acc * shrink[:, None] + attended
        best = new_best

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # idle rows: 0
    kept = own[:, None] & (value_dim < VALUE_DIM)[None, :]
    if num_splits == 1:
        line = row.to(tl.int64) * (HEADS * GROUP) + heads
        whole = out + line[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(whole, acc.to(out.dtype.element_ty), mask=kept)
    else:
        tl.store(parts + part[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=kept)
        tl.store(normalizers + part, tl.where(total == 0.0, best, best + tl.log2(total)), mask=own)


@triton.jit
def _join_kernel(
    parts,  # float32 [S, H, E]
    normalizers,  # float32 [S, H]
    joins,  # [J, 3] int32, see splits.py
    out,  # [B, H, E]
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    JOINED: tl.constexpr,
):
    head, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(joins + place * 3).to(tl.int64)
    first = tl.load(joins + place * 3 + 1)
    last = first + tl.load(joins + place * 3 + 2)
    if first == last:
        return
    dim = tl.arange(0, VALUE_PAD)
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([VALUE_PAD], tl.float32)
    for begin in range(first, last, JOINED):
        split = begin + tl.arange(0, JOINED)
        line = split.to(tl.int64) * NUM_HEADS + head
        normalizer = tl.load(normalizers + line, mask=split < last, other=-float("inf"))
        new_best = tl.maximum(best, tl.max(normalizer, 0))
        base = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(normalizer - base)
        part = tl.load(  # parts of splits that saw nothing hold garbage
            parts + line[:, None] * VALUE_DIM + dim[None, :],
            mask=(normalizer > -float("inf"))[:, None] & (dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)
    place = out + (row * NUM_HEADS + head) * VALUE_DIM + dim
    tl.store(place, acc.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


def paged_decode(
    query: Tensor,  # [B, H, D]
    key: Tensor,  # [B, K, D]
    value: Tensor,  # [B, K, E]
    cache: Tensor,  # [slots, K, D + E], or bytes of an FP8 cache; written
    tables: Tensor,  # [B, W] int32; row stride may exceed W
    lengths: Tensor,  # [B] int64
    splits: Tensor,  # [S or more, 4] int32
    joins: Tensor,  # [B or more, 3] int32
    block_tokens: int,
    num_splits: int,
    scale: float,
    window: int,  # 0 = none
    cap: float,  # 0 = none
    sinks: Tensor | None,  # [H]
) -> Tensor:  # [B, H, E]
    (num_rows, num_heads, key_dim), is_fp8 = query.shape, cache.dtype == torch.uint8
    num_kv_heads, value_dim = value.shape[1:]
    query, key, value = (_rows_of_heads(x) for x in (query, key, value))
    pad, group = triton.next_power_of_2, num_heads // num_kv_heads
    out = query.new_empty(num_rows, num_heads, value_dim)
    parts = out.new_empty(num_splits, num_heads, value_dim, dtype=torch.float32)
    normalizers = parts.new_empty(num_splits, num_heads)
    _attend_kernel[(num_kv_heads, num_splits)](
        query,
        key,
        value,
        cache.view(FP8) if is_fp8 else cache,
        cache.view(torch.float32) if is_fp8 else lengths,
        *(tables, lengths, splits, out, parts, normalizers),
        scale if cap else scale * 1.4426950408889634,
        window,
        cap,
        lengths if sinks is None else sinks,
        *(x.stride(0) for x in (tables, query, key, value)),
        HEADS=num_kv_heads,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=cache.shape[2],
        IS_FP8=is_fp8,
        BLOCK_TOKENS=block_tokens,
        GROUP_PAD=max(16, pad(group)),
        KEY_PAD=max(16, pad(key_dim)),
        VALUE_PAD=max(16, pad(value_dim)),
        TILE=_TILE if key_dim <= 128 else _TILE // 2,
        HAS_WINDOW=window > 0,
        HAS_CAP=cap > 0,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee",
        num_warps=2 if key_dim <= 128 else 4,
        num_stages=3,
    )
    if num_splits > num_rows:
        _join(parts, normalizers, joins, out)
    return out


def _join(parts: Tensor, normalizers: Tensor, joins: Tensor, out: Tensor) -> None:
    """Join the splits of the rows that have several; each of these rows has one in excess."""
    num_rows, num_heads, value_dim = out.shape
    _join_kernel[(num_heads, min(num_rows, len(parts) - num_rows))](
        parts,
        normalizers,
        joins,
        out,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=triton.next_power_of_2(value_dim),
        JOINED=_JOINED,
        num_warps=2,
    )


def _rows_of_heads(x: Tensor) -> Tensor:
    """[B, heads, dim] with heads and dim dense; only the row stride may be anything."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
