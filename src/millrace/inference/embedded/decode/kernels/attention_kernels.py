"""The Triton kernel of decode attention: one query token per row over a paged KV cache.

Only live KV is read: a program walks the blocks of one row, one KV head and one split of its
context. All query heads that share the KV head are the rows of one matrix product. The newest token
is attended to from registers while it is stored. The last program of a row and KV head that has
several splits joins them, so that a few long rows occupy the GPU as well as many short ones; which
one is the last does not change the result. There are no programs for splits that a row does not
have.

With a Rotation, queries and keys come as projected, and their norms and rotary embedding are
computed here. Heads are read in two halves, which rotary embedding combines.

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

from millrace.inference.embedded.decode.attention import Rotation
from millrace.inference.embedded.decode.kernels.overlap_kernels import (
    begin_kernel,
    overlap_options,
    prefetch,
)
from millrace.inference.embedded.decode.kernels.rotary_kernels import rotate_halves
from millrace.inference.embedded.fp8 import FP8

_TILE = 64  # tokens that a program handles at a time
_LINE_BYTES = 128
_JOINED = 16  # parts of heads that are joined at a time
_LOG2_E = tl.constexpr(1.4426950408889634)
_TINY, _LARGEST_FP8 = tl.constexpr(1e-12), tl.constexpr(448.0)


@triton.jit
def _join(
    parts,  # float32 [S, H, E], of the row's first split and KV head
    normalizers,  # float32 [S, H]
    out,  # of the row and KV head
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    JOINED: tl.constexpr,
):
    group, dim = tl.arange(0, GROUP_PAD), tl.arange(0, VALUE_PAD)
    is_head, is_value = group < GROUP, dim < VALUE_DIM
    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    for begin in range(0, num_splits, JOINED):
        split = begin + tl.arange(0, JOINED)
        line = split[:, None] * NUM_HEADS + group[None, :]
        is_part = (split < num_splits)[:, None] & is_head[None, :]
        # Other programs wrote them: not from this processor's cache.
        normalizer = tl.load(
            normalizers + line, mask=is_part, other=-float("inf"), cache_modifier=".cg"
        )
        # Parts of splits that saw nothing hold garbage.
        seen = (is_part & (normalizer > -float("inf")))[:, :, None] & is_value[None, None, :]
        part = tl.load(
            parts + line[:, :, None] * VALUE_DIM + dim[None, None, :],
            mask=seen,
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(normalizer, 0))
        base = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(normalizer - base[None, :])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 0)
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + group[:, None] * VALUE_DIM + dim[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_head[:, None] & is_value[None, :])


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
    arrivals,  # [B, K] int32, zeros between calls; splits that are done
    out,  # [B, H, E]
    parts,  # float32 [S, H, E]; of rows with several splits
    normalizers,  # float32 [S, H]; of these, log2 of the sum of exp2(scores)
    scale,  # of the scores, times log2(e) unless capped
    window,
    chunk,  # positions of a chunk of the context
    cap,
    sinks,  # [H]; unused without HAS_SINKS
    angles,  # [positions, 2, D / 2] float32; these four with ROTATES
    query_weight,  # [D], with HAS_NORM
    key_weight,
    eps,
    table_width,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,  # of matrix products; at least 16
    HALF_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    JOINED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    LINE: tl.constexpr,  # numbers of a cache line
    LINES: tl.constexpr,  # of an entry
    OVERLAPS: tl.constexpr,
):
    head = tl.program_id(0)
    place = tl.program_id(1)
    # The kernels before this one in the layer do not write these, so it need not wait for them.
    row = tl.load(splits + place * 4)
    split = tl.load(splits + place * 4 + 1)
    num_splits = tl.load(splits + place * 4 + 2)
    part_place = tl.load(splits + place * 4 + 3).to(tl.int64)
    if num_splits == 0:
        begin_kernel(OVERLAPS)
        return
    row = row.to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    first_token = 0
    if HAS_WINDOW:
        first_token = tl.maximum(length - window, 0)
    if HAS_CHUNK:
        first_token = tl.maximum((length - 1) // chunk * chunk, first_token)
    tiles = tl.cdiv(tl.cdiv(length - first_token, TILE), num_splits)
    start = first_token + split * tiles * TILE
    stop = tl.minimum(start + tiles * TILE, length)
    table = tables + row * table_width
    if OVERLAPS:
        ahead = start + tl.arange(0, TILE)
        own_blocks = tl.load(table + ahead // BLOCK_TOKENS, mask=ahead < stop, other=0)
        slots = own_blocks.to(tl.int64) * BLOCK_TOKENS + ahead % BLOCK_TOKENS
        lines = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
        prefetch(cache + ((slots * HEADS + head) * WIDTH)[:, None] + lines[None, :])
    begin_kernel(OVERLAPS)

    group = tl.arange(0, ROWS)
    at = tl.arange(0, HALF_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    is_head, is_key, is_value = group < GROUP, at < HALF, value_dim < VALUE_DIM
    heads = head * GROUP + group
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    if start < stop:
        angle = angles + (length - 1).to(tl.int64) * (2 * HALF)
        queries = query + row * query_stride + heads[:, None] * (2 * HALF) + at[None, :]
        is_query = is_head[:, None] & is_key[None, :]
        q1 = tl.load(queries, mask=is_query, other=0.0)
        q2 = tl.load(queries + HALF, mask=is_query, other=0.0)
        if ROTATES:
            r1, r2 = rotate_halves(
                q1.to(tl.float32), q2.to(tl.float32), at, angle, query_weight, eps, HALF, HAS_NORM
            )
            q1, q2 = r1.to(query.dtype.element_ty), r2.to(query.dtype.element_ty)
        if stop == length:
            # This split holds the newest token.
            newest_key = key + row * key_stride + head * (2 * HALF) + at
            n1 = tl.load(newest_key, mask=is_key, other=0.0)[None, :].to(tl.float32)
            n2 = tl.load(newest_key + HALF, mask=is_key, other=0.0)[None, :].to(tl.float32)
            if ROTATES:
                n1, n2 = rotate_halves(n1, n2, at, angle, key_weight, eps, HALF, HAS_NORM)
                n1 = n1.to(key.dtype.element_ty).to(tl.float32)
                n2 = n2.to(key.dtype.element_ty).to(tl.float32)
            newest_value = value + row * value_stride + head * VALUE_DIM + value_dim
            own_value = tl.load(newest_value, mask=is_value, other=0.0).to(tl.float32)
            newest = length - 1
            own_block = tl.load(table + newest // BLOCK_TOKENS).to(tl.int64)
            own_slot = own_block * BLOCK_TOKENS + newest % BLOCK_TOKENS
            own_entry = cache + (own_slot * HEADS + head) * WIDTH
            dtype = cache.dtype.element_ty
            if IS_FP8:
                top = tl.maximum(tl.max(tl.abs(n1)), tl.max(tl.abs(n2)))
                key_scale = tl.maximum(top, _TINY) / _LARGEST_FP8
                value_scale = tl.maximum(tl.max(tl.abs(own_value)), _TINY) / _LARGEST_FP8
                scales_at = scales + (own_slot * HEADS + head) * (WIDTH // 4) + (WIDTH - 16) // 4
                tl.store(scales_at, key_scale)
                tl.store(scales_at + 1, value_scale)
                n1, n2 = (n1 / key_scale).to(dtype), (n2 / key_scale).to(dtype)
                stored_value = (own_value / value_scale).to(dtype)
            else:
                n1, n2, stored_value = n1.to(dtype), n2.to(dtype), own_value.to(dtype)
            line = tl.zeros([1, HALF_PAD], tl.int32) + at[None, :]
            is_line = line < HALF
            tl.store(own_entry + line, n1, mask=is_line)
            tl.store(own_entry + HALF + line, n2, mask=is_line)
            tl.store(own_entry + 2 * HALF + value_dim, stored_value, mask=is_value)
            # What the cache holds now is attended to, as in later steps.
            n1, n2 = n1.to(tl.float32), n2.to(tl.float32)
            own_value = stored_value.to(tl.float32)
            score = tl.sum(q1.to(tl.float32) * n1, 1) + tl.sum(q2.to(tl.float32) * n2, 1)
            if IS_FP8:
                score *= key_scale
                own_value *= value_scale
            best = _in_base_2(score * scale, cap, HAS_CAP)
            total += 1.0
            acc += own_value[None, :]
            stop -= 1
        if HAS_SINKS:  # in one split
            sink = tl.load(sinks + heads, mask=is_head & (split == 0), other=-float("inf"))
            sink = sink.to(tl.float32) * _LOG2_E
            new_best = tl.maximum(best, sink)
            base = tl.where(new_best == -float("inf"), 0.0, new_best)
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.exp2(sink - base)
            acc *= shrink[:, None]
            best = new_best
        if IS_FP8 and query.dtype.element_ty != tl.float32:
            q1, q2 = q1.to(tl.float16), q2.to(tl.float16)
        for begin in tl.range(start, stop, TILE):
            token = begin + tl.arange(0, TILE)
            live = token < stop
            block = tl.load(table + token // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)
            slot = block * BLOCK_TOKENS + token % BLOCK_TOKENS
            entry = cache + (slot * HEADS + head) * WIDTH
            keys = entry[None, :] + at[:, None]
            is_live_key = live[None, :] & is_key[:, None]
            k1 = tl.load(keys, mask=is_live_key, other=0.0)
            k2 = tl.load(keys + HALF, mask=is_live_key, other=0.0)
            v = tl.load(
                entry[:, None] + 2 * HALF + value_dim[None, :],
                mask=live[:, None] & is_value[None, :],
                other=0.0,
            )
            if IS_FP8:
                scales_of = scales + (slot * HEADS + head) * (WIDTH // 4) + (WIDTH - 16) // 4
                key_scales = tl.load(scales_of, mask=live, other=0.0)
                value_scales = tl.load(scales_of + 1, mask=live, other=0.0)
                k1, k2, v = k1.to(q1.dtype), k2.to(q1.dtype), v.to(q1.dtype)
            scores = tl.dot(q1, k1, input_precision=PRECISION)
            scores = tl.dot(q2, k2, scores, input_precision=PRECISION) * scale
            if IS_FP8:
                scores *= key_scales[None, :]
            scores = _in_base_2(scores, cap, HAS_CAP)
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
    is_output = is_head[:, None] & is_value[None, :]
    own = out + (row * HEADS + head) * (GROUP * VALUE_DIM)
    if num_splits == 1:
        target = own + group[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=is_output)
    else:
        of_part = part_place * (HEADS * GROUP) + heads
        tl.store(parts + of_part[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=is_output)
        normalizer = tl.where(total == 0.0, -float("inf"), best + tl.log2(total))
        tl.store(normalizers + of_part, normalizer, mask=is_head)
        tl.debug_barrier()  # all threads have written before one of them says so
        arrival = arrivals + row * HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrival, 0)
            of_first = (part_place - split) * (HEADS * GROUP) + head * GROUP
            _join(
                parts + of_first * VALUE_DIM,
                normalizers + of_first,
                own,
                num_splits,
                HEADS * GROUP,
                GROUP,
                GROUP_PAD,
                VALUE_DIM,
                VALUE_PAD,
                JOINED,
            )


@triton.jit
def _in_base_2(scores, cap, HAS_CAP: tl.constexpr):
    """Scores as base-2 logarithms, which they already are without a cap."""
    if HAS_CAP:
        squashed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / cap) + 1.0)  # tanh
        scores = squashed * cap * _LOG2_E
    return scores


def paged_decode(
    query: Tensor,  # [B, H, D]
    key: Tensor,  # [B, K, D]
    value: Tensor,  # [B, K, E]
    cache: Tensor,  # [slots, K, D + E], or bytes of an FP8 cache; written
    tables: Tensor,  # [B, W] int32; row stride may exceed W
    lengths: Tensor,  # [B] int64
    splits: Tensor,  # [S or more, 4] int32
    arrivals: Tensor,  # [B or more, K or more] int32
    block_tokens: int,
    num_splits: int,
    scale: float,
    window: int,  # 0 = none
    cap: float,  # 0 = none
    sinks: Tensor | None,  # [H]
    chunk: int = 0,  # 0 = none
    rotation: Rotation | None = None,  # of queries and keys as projected
) -> Tensor:  # [B, H, E]
    (num_rows, num_heads, key_dim), is_fp8 = query.shape, cache.dtype == torch.uint8
    num_kv_heads, value_dim = value.shape[1:]
    assert key_dim % 2 == 0
    query, key, value = (_rows_of_heads(x) for x in (query, key, value))
    out = query.new_empty(num_rows, num_heads, value_dim)
    parts = out.new_empty(num_splits, num_heads, value_dim, dtype=torch.float32)
    normalizers = parts.new_empty(num_splits, num_heads)
    _attend_kernel[(num_kv_heads, num_splits)](
        *(query, key, value, cache.view(FP8) if is_fp8 else cache),
        cache.view(torch.float32) if is_fp8 else lengths,
        *(tables, lengths, splits, arrivals, out, parts, normalizers),
        scale if cap else scale * _LOG2_E.value,
        *(window, chunk, cap, lengths if sinks is None else sinks),
        *_rotation_arguments(rotation, unused=lengths),
        *(x.stride(0) for x in (tables, query, key, value)),
        **_sizes(num_heads // num_kv_heads, key_dim, value_dim, cache),
        HEADS=num_kv_heads,
        IS_FP8=is_fp8,
        BLOCK_TOKENS=block_tokens,
        HAS_WINDOW=window > 0,
        HAS_CHUNK=chunk > 0,
        HAS_CAP=cap > 0,
        HAS_SINKS=sinks is not None,
        ROTATES=rotation is not None,
        HAS_NORM=rotation is not None and rotation.norms is not None,
        PRECISION="ieee",
        num_warps=2 if key_dim <= 128 else 4,
        num_stages=3,
        **overlap_options(),
    )
    return out


def _sizes(group: int, key_dim: int, value_dim: int, cache: Tensor) -> dict[str, int]:
    pad, line = triton.next_power_of_2, _LINE_BYTES // cache.itemsize
    return {
        "GROUP": group,
        "HALF": key_dim // 2,
        "VALUE_DIM": value_dim,
        "WIDTH": cache.shape[2],
        "GROUP_PAD": pad(group),
        "ROWS": max(16, pad(group)),
        "HALF_PAD": max(16, pad(key_dim // 2)),
        "VALUE_PAD": max(16, pad(value_dim)),
        "TILE": _TILE if key_dim <= 128 else _TILE // 2,
        "JOINED": max(2, _JOINED // pad(group)),
        "LINE": line,
        "LINES": pad(triton.cdiv(cache.shape[2], line)),
    }


def _rotation_arguments(
    rotation: Rotation | None, *, unused: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    if rotation is None:
        return unused, unused, unused, 0.0
    return rotation.angles, *(rotation.norms or (unused, unused)), rotation.eps


def _rows_of_heads(x: Tensor) -> Tensor:
    """[B, heads, dim] with heads and dim dense; only the row stride may be anything."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
