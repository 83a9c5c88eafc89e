"""Triton kernel of exact mode: attention of tiles of queries to blocks of keys, in one order.

A program computes some queries of a tile, for the query heads that share a KV head. It is one warp
with 16 rows in decode steps, prefill and training alike: several warps
would divide the keys of a block among them, and sum in another order.
Imported on machines with CUDA only. See exact/attention.py for shapes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # of a block
_ROWS = 16  # of a program


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
    _attend_kernel[grid](
        query,
        key,
        value,
        out,
        lse,
        *tiles[:4],
        tiles.tables.entries,
        tiles.tables.offsets,
        rules.scale * 1.4426950408889634,
        rules.window or 0,
        num_rows,
        query.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=num_heads,
        GROUP=group,
        GROUP_PAD=padded,
        QUERIES=queries,
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
