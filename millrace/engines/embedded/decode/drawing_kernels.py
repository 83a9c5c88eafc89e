"""Triton kernels that draw tokens: one pass over the logits to sum them up by chunks, then one
chunk more for the draw; truncation adds a search for the smallest logit that stays.

They follow sampler.py, which is their oracle: temperature, then top-k, top-p and min-p, each on
what is left; ties with the last kept one stay; one draw by inverse CDF in the order of token ids.

Imported on machines with CUDA only. B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.engines.embedded.draws import FACTOR_1, FACTOR_2, GOLDEN, signed

_CHUNK = 4096
_GOLDEN = tl.constexpr(signed(GOLDEN))
_FACTOR_1 = tl.constexpr(signed(FACTOR_1))
_FACTOR_2 = tl.constexpr(signed(FACTOR_2))
# The search narrows a 33-bit range of sortable keys by 3 bits in each pass over the row.
_PASSES = tl.constexpr(11)


@triton.jit
def _scaled(logits, row, at, temperature, vocab):
    x = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=-float("inf"))
    return x / temperature


@triton.jit
def _temperature(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0.0, 1.0, temperature)  # greedy rows report logprobs at 1


@triton.jit
def _summarise_kernel(
    logits,  # [B, V] float32
    temperatures,  # [B] float32
    thresholds,  # [B] float32; smallest scaled logit that stays
    maxima,  # [B, C] float32
    sums,  # [B, C] float32; of exp(x - the chunk's maximum)
    best,  # [B, C] int32; first token that has the maximum
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits, row, at, _temperature(temperatures, row), vocab)
    if TRUNCATED:
        x = tl.where(x >= tl.load(thresholds + row), x, -float("inf"))
    maximum = tl.max(x, 0)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    place = row * num_chunks + chunk
    tl.store(maxima + place, maximum)
    tl.store(sums + place, tl.sum(tl.exp(x - shift), 0))
    tl.store(best + place, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)  # logical: int64 carries its sign along


@triton.jit
def _uniform(key, index):
    x = key + (index + 1) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FACTOR_1
    x = (x ^ _shifted(x, 27)) * _FACTOR_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _draw_kernel(
    logits,
    temperatures,
    thresholds,
    maxima,
    sums,
    best,
    keys,  # [B] int64
    indices,  # [B] int64
    tokens,  # [B] int64
    logprobs,  # [B] float32
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS_PAD)
    real = chunks < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunks, mask=real, other=-float("inf"))
    top = tl.max(maximum, 0)
    weight = tl.load(sums + row * num_chunks + chunks, mask=real, other=0.0) * tl.exp(maximum - top)
    weight = weight.to(tl.float64)
    total = tl.sum(weight, 0)
    # In float64, so that a rounding step of the sum is never taken for an impossible token.
    target = _uniform(tl.load(keys + row), tl.load(indices + row)) * total
    through = tl.cumsum(weight, 0)
    chosen = tl.sum((real & (through <= target)).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weight > 0.0, chunks, 0), 0))
    rest = target - tl.sum(tl.where(chunks == chosen, through - weight, 0.0), 0)

    temperature = _temperature(temperatures, row)
    within = tl.arange(0, CHUNK)
    x = _scaled(logits, row, chosen * CHUNK + within, temperature, vocab)
    if TRUNCATED:
        x = tl.where(x >= tl.load(thresholds + row), x, -float("inf"))
    weight = tl.exp(x - top).to(tl.float64)
    through = tl.cumsum(weight, 0)
    offset = tl.sum((through <= rest).to(tl.int32), 0)
    offset = tl.minimum(offset, tl.max(tl.where(weight > 0.0, within, 0), 0))
    token = chosen * CHUNK + offset

    first = tl.min(tl.where(maximum == top, chunks, CHUNKS_PAD - 1), 0)
    greedy = tl.load(temperatures + row) == 0.0
    likeliest = tl.load(best + row * num_chunks + tl.minimum(first, num_chunks - 1))
    token = tl.minimum(tl.where(greedy, likeliest, token), vocab - 1)
    value = tl.load(logits + row.to(tl.int64) * vocab + token) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, value - top - tl.log(total).to(tl.float32))


@triton.jit
def _sortable(x):
    """Keys 0..2^32 - 1 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _largest_key(
    logits, row, temperature, vocab, top, wanted, MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """Largest key t such that the tokens with keys >= t number, or weigh, at least `wanted`."""
    found = tl.full([], 0, tl.int64)
    for step in range(_PASSES):
        n1 = tl.zeros([CHUNK], tl.float32)
        n2 = tl.zeros([CHUNK], tl.float32)
        n3 = tl.zeros([CHUNK], tl.float32)
        n4 = tl.zeros([CHUNK], tl.float32)
        n5 = tl.zeros([CHUNK], tl.float32)
        n6 = tl.zeros([CHUNK], tl.float32)
        n7 = tl.zeros([CHUNK], tl.float32)
        unit = tl.full([], 1, tl.int64) << (30 - 3 * step)
        for begin in range(0, vocab, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            x = _scaled(logits, row, at, temperature, vocab)
            amount = tl.exp(x - top) if MASS else tl.where(at < vocab, 1.0, 0.0)
            key = _sortable(x)
            n1 += tl.where(key >= found + unit, amount, 0.0)
            n2 += tl.where(key >= found + 2 * unit, amount, 0.0)
            n3 += tl.where(key >= found + 3 * unit, amount, 0.0)
            n4 += tl.where(key >= found + 4 * unit, amount, 0.0)
            n5 += tl.where(key >= found + 5 * unit, amount, 0.0)
            n6 += tl.where(key >= found + 6 * unit, amount, 0.0)
            n7 += tl.where(key >= found + 7 * unit, amount, 0.0)
        enough = (
            (tl.sum(n1, 0) >= wanted).to(tl.int64)
            + (tl.sum(n2, 0) >= wanted).to(tl.int64)
            + (tl.sum(n3, 0) >= wanted).to(tl.int64)
            + (tl.sum(n4, 0) >= wanted).to(tl.int64)
            + (tl.sum(n5, 0) >= wanted).to(tl.int64)
            + (tl.sum(n6, 0) >= wanted).to(tl.int64)
            + (tl.sum(n7, 0) >= wanted).to(tl.int64)
        )
        found += enough * unit
    return found


@triton.jit
def _threshold_kernel(
    logits,
    temperatures,
    top_ks,  # [B] int64; 0 = off
    top_ps,  # [B] float32; 1 = off
    min_ps,  # [B] float32; 0 = off
    maxima,
    thresholds,  # [B] float32
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunks, mask=inside, other=-float("inf"))
    top = tl.max(maximum, 0)
    temperature = _temperature(temperatures, row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    greedy = tl.load(temperatures + row) == 0.0
    smallest = tl.full([], 0, tl.int64)
    if (top_k > 0) & (top_k < vocab) & (greedy == 0):
        smallest = _largest_key(
            logits, row, temperature, vocab, top, top_k.to(tl.float32), False, CHUNK
        )
    if (top_p < 1.0) & (greedy == 0):
        weight = tl.zeros([CHUNK], tl.float32)
        for begin in range(0, vocab, CHUNK):
            x = _scaled(logits, row, begin + tl.arange(0, CHUNK), temperature, vocab)
            weight += tl.where(_sortable(x) >= smallest, tl.exp(x - top), 0.0)
        wanted = tl.sum(weight, 0) * top_p
        nucleus = _largest_key(logits, row, temperature, vocab, top, wanted, True, CHUNK)
        smallest = tl.maximum(smallest, nucleus)
    key = (smallest - 2147483648).to(tl.int32)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    threshold = tl.where(smallest == 0, -float("inf"), bits.to(tl.float32, bitcast=True))
    if (min_p > 0.0) & (greedy == 0):
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    tl.store(thresholds + row, threshold)


@triton.jit
def _list_kernel(
    logits,
    temperatures,
    thresholds,
    ids,  # [B, CAPACITY] int32; ascending
    counts,  # [B] int32; beyond CAPACITY, only the count is right
    vocab,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = _temperature(temperatures, row)
    threshold = tl.load(thresholds + row)
    count = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        x = _scaled(logits, row, at, temperature, vocab)
        stays = (x >= threshold) & (at < vocab)
        number = stays.to(tl.int32)
        place = count + tl.cumsum(number, 0) - number
        tl.store(ids + row * CAPACITY + place, at, mask=stays & (place < CAPACITY))
        count += tl.sum(number, 0)
    tl.store(counts + row, tl.where(count == vocab, 0, count))  # all = nothing was ruled out


def draw(
    logits: Tensor,  # [B, V] float32, contiguous
    *,
    temperatures: Tensor,
    keys: Tensor,
    indices: Tensor,
    truncation: tuple[Tensor, Tensor, Tensor] | None,  # top-k, top-p, min-p
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Tokens [B] int64, logprobs [B]; with truncation kept ids [B, capacity] and counts [B]."""
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    padded = triton.next_power_of_2(num_chunks)
    maxima = logits.new_empty(num_rows, num_chunks)
    sums = torch.empty_like(maxima)
    best = torch.empty_like(maxima, dtype=torch.int32)
    thresholds = torch.empty_like(temperatures)
    grid = (num_rows, num_chunks)
    summaries = (logits, temperatures, thresholds, maxima, sums, best)
    _summarise_kernel[grid](*summaries, vocab, num_chunks, CHUNK=_CHUNK, TRUNCATED=False)
    kept = counts = None
    if truncation is not None:
        _threshold_kernel[(num_rows,)](
            logits,
            temperatures,
            *truncation,
            maxima,
            thresholds,
            vocab,
            num_chunks,
            CHUNK=_CHUNK,
            CHUNKS_PAD=padded,
            num_warps=16,
        )
        _summarise_kernel[grid](*summaries, vocab, num_chunks, CHUNK=_CHUNK, TRUNCATED=True)
        kept, counts = _list_kept(logits, temperatures, thresholds, capacity=capacity)
    tokens = torch.empty_like(keys)
    logprobs = torch.empty_like(temperatures)
    _draw_kernel[(num_rows,)](
        *summaries,
        keys,
        indices,
        tokens,
        logprobs,
        vocab,
        num_chunks,
        CHUNK=_CHUNK,
        CHUNKS_PAD=padded,
        TRUNCATED=truncation is not None,
        num_warps=8,
    )
    return tokens, logprobs, kept, counts


def _list_kept(
    logits: Tensor, temperatures: Tensor, thresholds: Tensor, *, capacity: int
) -> tuple[Tensor, Tensor]:  # [B, capacity], [B] int32
    num_rows, vocab = logits.shape
    kept = torch.empty(num_rows, capacity, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _list_kernel[(num_rows,)](
        logits,
        temperatures,
        thresholds,
        kept,
        counts,
        vocab,
        CAPACITY=capacity,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return kept, counts
