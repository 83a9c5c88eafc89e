"""Triton kernels that sample tokens: one pass over the logits sums them by chunk, then one chunk is
read again for the draw. Truncation adds two passes that find the candidates of each row. For rows
with too many of them, two more passes find the threshold of top-p. Where that fails, and for top-k
beyond CANDIDATES, a search over the whole vocabulary takes about twenty passes.

They compute what sampler.sample() computes, which is the reference of their tests.

Imported on machines with CUDA only. B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.decode.kernels.nucleus_kernels import find_nuclei
from millrace.inference.embedded.decode.kernels.truncation_kernels import (
    CANDIDATES,
    inverse_cdf,
    is_sampled,
    sample_from_candidates,
    scaled,
    temperature_of,
    uniform,
)

_CHUNK = 4096
# The search narrows a 33-bit range of sortable keys by 3 bits in each pass over the row.
_PASSES = tl.constexpr(11)
_SMALLEST, _LARGEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # not the keys of any logits


@triton.jit
def _stays(x, threshold):
    # Ids that a grammar rules out are -inf, and no threshold may let them pass.
    return (x >= threshold) & (x > -float("inf"))


@triton.jit
def _summarise_kernel(
    logits,  # [B, V] float32
    temperatures,  # [B] float32
    thresholds,  # [B] float32; smallest scaled logit that stays
    maxima,  # [B, C] float32
    sums,  # [B, C] float32; of exp(x - the chunk's maximum)
    best,  # [B, C] int32; first token that has the maximum
    num_candidates,  # [B] int32
    num_stay,  # [B, C] int32; tokens that stay
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,  # only rows that are not drawn yet, and of them what stays
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if TRUNCATED and is_sampled(num_candidates, row):
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits, row, at, temperature_of(temperatures, row), vocab)
    place = row * num_chunks + chunk
    if TRUNCATED:
        stays = _stays(x, tl.load(thresholds + row))
        x = tl.where(stays, x, -float("inf"))
        tl.store(num_stay + place, tl.sum(stays.to(tl.int32), 0))
    maximum = tl.max(x, 0)
    shift = tl.where(maximum == -float("inf"), 0.0, maximum)
    tl.store(maxima + place, maximum)
    tl.store(sums + place, tl.sum(tl.exp(x - shift), 0))
    tl.store(best + place, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit
def _sample_kernel(
    logits,
    temperatures,
    thresholds,
    maxima,
    sums,
    best,
    num_candidates,
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
    if TRUNCATED and is_sampled(num_candidates, row):
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    real = chunks < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunks, mask=real, other=-float("inf"))
    top = tl.max(maximum, 0)
    weight = tl.load(sums + row * num_chunks + chunks, mask=real, other=0.0) * tl.exp(maximum - top)
    weight = weight.to(tl.float64)
    total = tl.sum(weight, 0)
    # In float64, so that a rounding step of the sum is never taken for an impossible token.
    target = uniform(tl.load(keys + row), tl.load(indices + row)) * total
    chosen = inverse_cdf(weight, chunks, target)
    rest = target - tl.sum(tl.where(chunks < chosen, weight, 0.0), 0)

    temperature = temperature_of(temperatures, row)
    within = tl.arange(0, CHUNK)
    x = scaled(logits, row, chosen * CHUNK + within, temperature, vocab)
    if TRUNCATED:
        x = tl.where(x >= tl.load(thresholds + row), x, -float("inf"))
    weight = tl.exp(x - top).to(tl.float64)
    token = chosen * CHUNK + inverse_cdf(weight, within, rest)

    first = tl.min(tl.where(maximum == top, chunks, CHUNKS_PAD - 1), 0)
    greedy = tl.load(temperatures + row) == 0.0
    likeliest = tl.load(best + row * num_chunks + tl.minimum(first, num_chunks - 1))
    token = tl.minimum(tl.where(greedy, likeliest, token), vocab - 1)
    value = tl.load(logits + row.to(tl.int64) * vocab + token) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, value - top - tl.log(total).to(tl.float32))


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
def _threshold_kernel(
    logits,
    temperatures,
    top_ks,  # [B] int64; 0 = off
    top_ps,  # [B] float32; 1 = off
    min_ps,  # [B] float32; 0 = off
    maxima,  # [B, C] float32
    is_found,  # [B] int32; 1 = the threshold is known
    thresholds,  # [B] float32; smallest scaled logit that stays
    num_candidates,  # [B] int32
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    if is_sampled(num_candidates, row) | (tl.load(is_found + row) == 1):
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
def _list_kernel(
    logits,
    temperatures,
    thresholds,
    num_candidates,
    num_stay,  # [B, C] int32
    ids,  # [B, CAPACITY] int32; ascending, or if there are more ids, a mask as in Kept
    counts,  # [B] int32; numbers in the row
    vocab,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if is_sampled(num_candidates, row):
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    number = tl.load(num_stay + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    count = tl.sum(number, 0)
    # All = nothing was ruled out. A greedy row is not truncated.
    size = tl.where((count == vocab) | (tl.load(temperatures + row) == 0.0), 0, count)
    is_mask = size > CAPACITY
    if chunk == 0:
        tl.store(counts + row, tl.where(is_mask, 1 + tl.cdiv(vocab, 32), size))
        if is_mask:
            tl.store(ids + row * CAPACITY, -count)
    if size == 0:
        return
    temperature = temperature_of(temperatures, row)
    threshold = tl.load(thresholds + row)
    if is_mask:
        word, bit = tl.arange(0, CHUNK // 32), tl.arange(0, 32)
        places = chunk * CHUNK + word[:, None] * 32 + bit[None, :]
        is_one = _stays(scaled(logits, row, places, temperature, vocab), threshold)
        bits = tl.sum(is_one.to(tl.int32) << bit[None, :], 1)
        target = chunk * (CHUNK // 32) + word
        tl.store(ids + row * CAPACITY + 1 + target, bits, mask=target * 32 < vocab)
    else:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        stays = _stays(scaled(logits, row, at, temperature, vocab), threshold)
        place = tl.sum(tl.where(chunks < chunk, number, 0), 0)
        place += tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(ids + row * CAPACITY + place, at, mask=stays)


def sample(
    logits: Tensor,  # [B, V] float32, contiguous
    *,
    temperatures: Tensor,
    keys: Tensor,
    indices: Tensor,
    truncation: tuple[Tensor, Tensor, Tensor] | None,  # top-k, top-p, min-p
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Tokens [B] int64, logprobs [B]; with truncation kept ids [B, capacity] and the
    numbers in each row [B]."""
    vectors = (temperatures, keys, indices, *(truncation or ()))
    assert all(vector.is_contiguous() for vector in vectors)
    num_rows, vocab = logits.shape
    assert capacity >= CANDIDATES.value
    num_chunks = triton.cdiv(vocab, _CHUNK)
    padded = triton.next_power_of_2(num_chunks)
    maxima = logits.new_empty(num_rows, num_chunks)
    sums = torch.empty_like(maxima)
    best = torch.empty_like(maxima, dtype=torch.int32)
    thresholds = torch.empty_like(temperatures)
    draws = (keys, indices, torch.empty_like(keys), torch.empty_like(temperatures))
    summaries = (logits, temperatures, thresholds, maxima, sums, best)
    sizes = {"vocab": vocab, "num_chunks": num_chunks, "CHUNK": _CHUNK}
    grid = (num_rows, num_chunks)
    _summarise_kernel[grid](*summaries, None, None, **sizes, TRUNCATED=False)
    kept = counts = num_candidates = None
    if truncation is not None:
        rules = (temperatures, *truncation)
        kept = torch.empty(num_rows, capacity, dtype=torch.int32, device=logits.device)
        counts = torch.empty_like(temperatures, dtype=torch.int32)
        known = {"rules": rules, "summaries": (maxima, sums), "chunk": _CHUNK}
        histograms, *bins, num_candidates = sample_from_candidates(
            logits, **known, draws=draws, kept=kept, counts=counts
        )
        is_found = find_nuclei(
            logits, **known, bins=tuple(bins), histograms=histograms, thresholds=thresholds
        )
        found = (thresholds, num_candidates)
        search = {"CHUNKS_PAD": padded, "num_warps": 16}
        _threshold_kernel[(num_rows,)](logits, *rules, maxima, is_found, *found, **sizes, **search)
        num_stay = torch.empty_like(best)
        _summarise_kernel[grid](*summaries, num_candidates, num_stay, **sizes, TRUNCATED=True)
        room = {"CAPACITY": capacity, "CHUNKS_PAD": padded}
        _list_kernel[grid](logits, temperatures, *found, num_stay, kept, counts, **sizes, **room)
    _sample_kernel[(num_rows,)](
        *summaries,
        num_candidates,
        *draws,
        **sizes,
        CHUNKS_PAD=padded,
        TRUNCATED=truncation is not None,
        num_warps=8,
    )
    _, _, tokens, logprobs = draws
    return tokens, logprobs, kept, counts


@triton.jit
def _join_kernel(rows, sizes, ends, out, num_steps, slot_stride, step_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    size = tl.load(sizes + row)
    start = tl.load(ends + row) - size
    source = rows + (row // num_steps) * slot_stride + (row % num_steps) * step_stride
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < size)
        tl.store(out + start + at, value, mask=at < size)


def join_rows(rows: Tensor, sizes: Tensor) -> Tensor:
    """The first `sizes` [R, N] numbers of rows [R, N, capacity], row after row."""
    sizes = sizes.contiguous()
    ends = sizes.flatten().cumsum(0)  # int64
    out = rows.new_empty(int(ends[-1]))
    slot_stride, step_stride, _ = rows.stride()
    _join_kernel[(sizes.numel(),)](
        rows, sizes, ends, out, sizes.shape[1], slot_stride, step_stride, BLOCK=1024
    )
    return out
