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
_SMALLEST, _LARGEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # not the keys of any logits


@triton.jit
def _sortable(x):
    """int32 keys in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(found, places):
    """The key `places` above another, for comparisons."""
    return tl.minimum(found + places, _LARGEST).to(tl.int32)


@triton.jit
def _largest_key(
    logits, row, temperature, vocab, top, wanted, MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """Largest key t such that the tokens with keys >= t number, or weigh, at least `wanted`."""
    found = tl.full([], _SMALLEST, tl.int64)
    for step in range(_PASSES):
        n1 = tl.zeros([CHUNK], tl.float32)
        n2 = tl.zeros([CHUNK], tl.float32)
        n3 = tl.zeros([CHUNK], tl.float32)
        n4 = tl.zeros([CHUNK], tl.float32)
        n5 = tl.zeros([CHUNK], tl.float32)
        n6 = tl.zeros([CHUNK], tl.float32)
        n7 = tl.zeros([CHUNK], tl.float32)
        unit = tl.full([], 1, tl.int64) << (30 - 3 * step)
        k1, k2, k3 = _above(found, unit), _above(found, 2 * unit), _above(found, 3 * unit)
        k4, k5, k6 = _above(found, 4 * unit), _above(found, 5 * unit), _above(found, 6 * unit)
        k7 = _above(found, 7 * unit)
        for begin in range(0, vocab, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            x = scaled(logits, row, at, temperature, vocab)
            amount = tl.exp(x - top) if MASS else tl.where(at < vocab, 1.0, 0.0)
            key = _sortable(x)
            n1 += tl.where(key >= k1, amount, 0.0)
            n2 += tl.where(key >= k2, amount, 0.0)
            n3 += tl.where(key >= k3, amount, 0.0)
            n4 += tl.where(key >= k4, amount, 0.0)
            n5 += tl.where(key >= k5, amount, 0.0)
            n6 += tl.where(key >= k6, amount, 0.0)
            n7 += tl.where(key >= k7, amount, 0.0)
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
    return tl.minimum(found, _LARGEST)


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
    smallest = tl.full([], _SMALLEST, tl.int64)
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
    key = smallest.to(tl.int32)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    is_none = smallest == _SMALLEST
    threshold = tl.where(is_none, -float("inf"), bits.to(tl.float32, bitcast=True))
    if (min_p > 0.0) & (greedy == 0):
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    tl.store(thresholds + row, threshold)


@triton.jit
def list_kernel(
    logits,
    temperatures,
    thresholds,
    num_candidates,
    ids,  # [B, CAPACITY] int32; ascending, or if there are more ids, a mask as in Kept
    counts,  # [B] int32; numbers in the row
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
        # Ids that a grammar rules out are -inf, and no threshold may let them pass.
        stays = (x >= threshold) & (x > -float("inf"))
        number = stays.to(tl.int32)
        place = count + tl.cumsum(number, 0) - number
        tl.store(ids + row * CAPACITY + place, at, mask=stays & (place < CAPACITY))
        count += tl.sum(number, 0)
    # All = nothing was ruled out. A greedy row is not truncated.
    size = tl.where((count == vocab) | (tl.load(temperatures + row) == 0.0), 0, count)
    if size > CAPACITY:
        tl.store(ids + row * CAPACITY, -count)
        word, bit = tl.arange(0, CHUNK // 32), tl.arange(0, 32)
        for begin in range(0, vocab, CHUNK):
            at = begin + word[:, None] * 32 + bit[None, :]
            x = scaled(logits, row, at, temperature, vocab)
            stays = (x >= threshold) & (x > -float("inf"))
            bits = tl.sum(stays.to(tl.int32) << bit[None, :], 1)
            place = begin // 32 + word
            tl.store(ids + row * CAPACITY + 1 + place, bits, mask=place * 32 < vocab)
        size = 1 + tl.cdiv(vocab, 32)
    tl.store(counts + row, size)
