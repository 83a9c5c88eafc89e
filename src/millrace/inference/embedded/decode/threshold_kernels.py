"""Triton kernels that find the tokens that truncation keeps by a search over the whole vocabulary.

They serve rows with more candidates than truncation_kernels.py has room for, in about twenty passes
over the row. Rows that were sampled there are skipped.

Imported on machines with CUDA only. B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

import triton
import triton.language as tl

from millrace.inference.embedded.decode.logits_kernels import is_sampled, scaled, temperature_of

# The search narrows a 33-bit range of sortable keys by 3 bits in each pass over the row.
_PASSES = tl.constexpr(11)


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
            x = scaled(logits, row, at, temperature, vocab)
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
def threshold_kernel(
    logits,
    temperatures,
    top_ks,  # [B] int64; 0 = off
    top_ps,  # [B] float32; 1 = off
    min_ps,  # [B] float32; 0 = off
    maxima,  # [B, C] float32
    thresholds,  # [B] float32; smallest scaled logit that stays
    num_candidates,  # [B] int32
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    if is_sampled(num_candidates, row):
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunks, mask=inside, other=-float("inf"))
    top = tl.max(maximum, 0)
    temperature = temperature_of(temperatures, row)
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
            x = scaled(logits, row, begin + tl.arange(0, CHUNK), temperature, vocab)
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
def list_kernel(
    logits,
    temperatures,
    thresholds,
    num_candidates,
    ids,  # [B, CAPACITY] int32; ascending
    counts,  # [B] int32; beyond CAPACITY, only the count is right
    vocab,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    if is_sampled(num_candidates, row):
        return
    temperature = temperature_of(temperatures, row)
    threshold = tl.load(thresholds + row)
    count = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        x = scaled(logits, row, at, temperature, vocab)
        stays = (x >= threshold) & (at < vocab)
        number = stays.to(tl.int32)
        place = count + tl.cumsum(number, 0) - number
        tl.store(ids + row * CAPACITY + place, at, mask=stays & (place < CAPACITY))
        count += tl.sum(number, 0)
    tl.store(counts + row, tl.where(count == vocab, 0, count))  # all = nothing was ruled out
