"""Triton kernels that sample from a truncated row in two passes over its logits.

The first pass counts the logits by their distance from the largest one, in bins. The counts bound
the distance of tokens that truncation may keep. The second pass lists the tokens within it: the
candidates. They are few enough to be sorted, so the rules of sampler.py apply to them exactly.
A row with more than CANDIDATES of them is left to nucleus_kernels.py and sampling_kernels.py. The
first functions are those that all sampling kernels share.

Imported on machines with CUDA only. B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.sampler import FACTOR_1, FACTOR_2, GOLDEN, signed

CANDIDATES = tl.constexpr(1024)  # most tokens per row that can be sorted
_GOLDEN = tl.constexpr(signed(GOLDEN))
_FACTOR_1 = tl.constexpr(signed(FACTOR_1))
_FACTOR_2 = tl.constexpr(signed(FACTOR_2))
BINS = tl.constexpr(256)  # the last one takes all greater distances
BIN = tl.constexpr(0.125)  # nats
# Sums are rounded: one bin too many is harmless, one too few is not.
MARGIN = tl.constexpr(0.999)


@triton.jit
def scaled(logits, row, at, temperature, vocab):
    x = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=-float("inf"))
    return x / temperature


@triton.jit
def temperature_of(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0.0, 1.0, temperature)  # greedy rows report logprobs at 1


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)  # logical: int64 carries its sign along


@triton.jit
def uniform(key, index):
    x = key + (index + 1) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FACTOR_1
    x = (x ^ _shifted(x, 27)) * _FACTOR_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def inverse_cdf(weight, at, target):
    """The first of the places `at` up to which the weights, float64, exceed `target`."""
    place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    return tl.minimum(place, tl.max(tl.where(weight > 0.0, at, 0), 0))


@triton.jit
def is_sampled(num_candidates, row):
    """True if the row had at most CANDIDATES candidates, and so was sampled from them."""
    return tl.load(num_candidates + row) <= CANDIDATES


@triton.jit
def _bin(x, top):
    distance = (top - x) / BIN
    return tl.where(distance < BINS - 1, distance, BINS - 1).to(tl.int32)


@triton.jit
def largest(maxima, sums, row, num_chunks, CHUNKS_PAD: tl.constexpr):
    """The row's largest scaled logit, and the sum of exp(x - it)."""
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    maximum = tl.load(maxima + row * num_chunks + chunks, mask=inside, other=-float("inf"))
    top = tl.max(maximum, 0)
    weight = tl.load(sums + row * num_chunks + chunks, mask=inside, other=0.0)
    return top, tl.sum(weight * tl.exp(maximum - top), 0)


@triton.jit
def _last_bin(histogram, total, top_k, top_p, min_p):
    """The last bin that may hold a kept token."""
    bins = tl.arange(0, BINS)
    last = BINS - 1
    if top_k > 0:
        last = tl.sum((tl.cumsum(histogram, 0) < top_k).to(tl.int32), 0)
    elif top_p < 1.0:
        # No token of a bin weighs more than the bin's upper edge, which bounds the weight outside.
        weight = histogram * tl.exp(-BIN * bins.to(tl.float32))
        outside = tl.sum(weight, 0) - tl.cumsum(weight, 0)
        last = tl.sum((outside > (1.0 - top_p) * total * MARGIN).to(tl.int32), 0)
    if (min_p > 0.0) & ((top_k == 0) | (top_p >= 1.0)):  # top-p weighs all tokens that top-k keeps
        last = tl.minimum(last, (-tl.log(min_p) / BIN).to(tl.int32) + 1)
    return tl.minimum(last, BINS - 1)


@triton.jit
def _first_bin(histogram, total, top_p):
    """The first bin that may hold the last token that top-p keeps."""
    bins = tl.arange(0, BINS)
    # No token of a bin weighs less than the bin's lower edge; those of the last bin may weigh none.
    weight = histogram * tl.exp(-BIN * (bins + 1).to(tl.float32))
    weight = tl.where(bins < BINS - 1, weight, 0.0)
    outside = tl.sum(weight, 0) - tl.cumsum(weight, 0)
    return tl.sum((outside > (1.0 - top_p) * total / MARGIN).to(tl.int32), 0)


@triton.jit
def _count_kernel(
    logits,  # [B, V] float32
    temperatures,  # [B] float32
    maxima,  # [B, C] float32
    sums,  # [B, C] float32; of exp(x - the chunk's maximum)
    histograms,  # [B, C, BINS] int32
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    top, _ = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits, row, at, temperature_of(temperatures, row), vocab)
    place = (row * num_chunks + chunk) * BINS + tl.arange(0, BINS)
    tl.store(histograms + place, tl.histogram(_bin(x, top), BINS))


@triton.jit
def _cut_kernel(
    temperatures,
    top_ks,  # [B] int64; 0 = off
    top_ps,  # [B] float32; 1 = off
    min_ps,  # [B] float32; 0 = off
    maxima,
    sums,
    histograms,
    first_bins,  # [B] int32; of a search for the threshold of top-p, -1 = none is necessary
    last_bins,  # [B] int32
    starts,  # [B, C] int32; candidates in earlier chunks
    num_candidates,  # [B] int32; above CANDIDATES: too many, or nothing is ruled out
    vocab,
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    top_k = tl.where(top_k < vocab, top_k, 0)
    truncates = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    tl.store(num_candidates + row, CANDIDATES + 1)
    tl.store(first_bins + row, -1)
    if (tl.load(temperatures + row) == 0.0) | (truncates == 0) | (top_k > CANDIDATES):
        return
    _, total = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    chunks, bins = tl.arange(0, CHUNKS_PAD), tl.arange(0, BINS)
    place = (row * num_chunks + chunks)[:, None] * BINS + bins[None, :]
    counts = tl.load(histograms + place, mask=(chunks < num_chunks)[:, None], other=0)
    histogram = tl.sum(counts, 0)
    last = _last_bin(histogram, total, top_k, top_p, min_p)
    near = tl.sum(tl.where(bins[None, :] <= last, counts, 0), 1)
    tl.store(last_bins + row, last)
    tl.store(
        starts + row * num_chunks + chunks, tl.cumsum(near, 0) - near, mask=chunks < num_chunks
    )
    number = tl.sum(near, 0)
    tl.store(num_candidates + row, number)
    if (number > CANDIDATES) & (top_k == 0) & (top_p < 1.0):
        first = _first_bin(histogram, total, top_p)
        is_bounded = (first <= last) & (last < BINS - 1)  # the last bin has no lower edge
        tl.store(first_bins + row, tl.where(is_bounded, first, -1))


@triton.jit
def _list_kernel(
    logits,
    temperatures,
    maxima,
    sums,
    last_bins,
    starts,
    num_candidates,
    ids,  # [B, CANDIDATES] int32; ascending
    values,  # [B, CANDIDATES] float32; scaled logits
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if is_sampled(num_candidates, row) == 0:
        return
    top, _ = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    last = tl.load(last_bins + row)
    if _bin(tl.load(maxima + row * num_chunks + chunk), top) > last:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits, row, at, temperature_of(temperatures, row), vocab)
    near = (_bin(x, top) <= last) & (at < vocab)
    number = near.to(tl.int32)
    place = row * CANDIDATES + tl.load(starts + row * num_chunks + chunk)
    place += tl.cumsum(number, 0) - number
    tl.store(ids + place, at, mask=near)
    tl.store(values + place, x, mask=near)


@triton.jit
def _smallest(x, number, top, total, top_k, top_p):
    """The smallest candidate that top-k and top-p keep; x is -inf beyond `number` candidates."""
    ordered = tl.sort(x, descending=True)
    place = tl.arange(0, CANDIDATES)
    inside = place < tl.where(top_k > 0, tl.minimum(top_k, number), number)
    weight = tl.where(inside, tl.exp(ordered - top), 0.0).to(tl.float64)
    mass = tl.where(top_k > 0, tl.sum(weight, 0), total.to(tl.float64))
    likelier = tl.cumsum(weight, 0) - weight
    inside &= likelier < tl.where(top_p < 1.0, top_p * mass, float("inf"))
    return tl.min(tl.where(inside, ordered, float("inf")), 0)


@triton.jit
def _select_kernel(
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    sums,
    ids,
    values,
    num_candidates,
    keys,  # [B] int64
    indices,  # [B] int64
    tokens,  # [B] int64
    logprobs,  # [B] float32
    kept,  # [B, CAPACITY] int32; ascending
    counts,  # [B] int32
    vocab,
    num_chunks,
    CAPACITY: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    if is_sampled(num_candidates, row) == 0:
        return
    number = tl.load(num_candidates + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top, total = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    at = tl.arange(0, CANDIDATES)
    x = tl.load(values + row * CANDIDATES + at, mask=at < number, other=-float("inf"))
    threshold = -float("inf")
    if (top_k > 0) | (top_p < 1.0):
        threshold = _smallest(x, number, top, total, top_k, top_p)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    stays = (x >= threshold) & (x > -float("inf"))  # -inf: no candidate, or not in a grammar
    token_ids = tl.load(ids + row * CANDIDATES + at, mask=at < number, other=0)
    listed = stays.to(tl.int32)
    count = tl.sum(listed, 0)
    place = tl.cumsum(listed, 0) - listed
    tl.store(kept + row * CAPACITY + place, token_ids, mask=stays)
    tl.store(counts + row, tl.where(count == vocab, 0, count))  # all = nothing was ruled out

    weight = tl.where(stays, tl.exp(x - top), 0.0).to(tl.float64)
    sum_kept = tl.sum(weight, 0)
    target = uniform(tl.load(keys + row), tl.load(indices + row)) * sum_kept
    chosen = at == inverse_cdf(weight, at, target)
    value = tl.sum(tl.where(chosen, x, 0.0), 0)
    tl.store(tokens + row, tl.sum(tl.where(chosen, token_ids, 0), 0).to(tl.int64))
    tl.store(logprobs + row, value - top - tl.log(sum_kept).to(tl.float32))


class Counts(NamedTuple):
    """What the first pass found."""

    histograms: Tensor  # [B, C, BINS] int32; not needed any more
    first_bins: Tensor  # [B] int32; between these bins lies the threshold of top-p, -1 = none
    last_bins: Tensor  # [B] int32
    num_candidates: Tensor  # [B] int32


def sample_from_candidates(
    logits: Tensor,  # [B, V] float32
    *,
    rules: tuple[Tensor, Tensor, Tensor, Tensor],  # [B] temperature, top-k, top-p, min-p
    summaries: tuple[Tensor, Tensor],  # [B, C] maxima, sums
    draws: tuple[Tensor, Tensor, Tensor, Tensor],  # [B] keys, indices; to fill: tokens, logprobs
    kept: Tensor,  # [B, capacity] int32, to fill
    counts: Tensor,  # [B] int32, to fill
    chunk: int,
) -> Counts:
    """Sample the rows with few candidates; is_sampled() reads their numbers."""
    num_rows, vocab = logits.shape
    num_chunks, capacity = summaries[0].shape[1], kept.shape[1]
    temperatures = rules[0]
    histograms = torch.empty(num_rows, num_chunks, BINS.value, **_integers(logits))
    first_bins, last_bins, num_candidates = torch.empty(3, num_rows, **_integers(logits))
    starts = torch.empty(num_rows, num_chunks, **_integers(logits))
    cuts = (last_bins, starts, num_candidates)
    ids = torch.empty(num_rows, CANDIDATES.value, **_integers(logits))
    found = (ids, torch.empty_like(ids, dtype=torch.float32))
    sizes = {"vocab": vocab, "num_chunks": num_chunks}
    sizes["CHUNKS_PAD"] = triton.next_power_of_2(num_chunks)
    rows, chunks = (num_rows,), (num_rows, num_chunks)
    _count_kernel[chunks](logits, temperatures, *summaries, histograms, **sizes, CHUNK=chunk)
    _cut_kernel[rows](*rules, *summaries, histograms, first_bins, *cuts, **sizes)
    _list_kernel[chunks](logits, temperatures, *summaries, *cuts, *found, **sizes, CHUNK=chunk)
    _select_kernel[rows](
        *rules, *summaries, *found, num_candidates, *draws, kept, counts, **sizes, CAPACITY=capacity
    )
    return Counts(histograms, first_bins, last_bins, num_candidates)


def _integers(like: Tensor) -> dict[str, Any]:
    return {"dtype": torch.int32, "device": like.device}
