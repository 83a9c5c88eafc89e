"""Triton kernels that find the threshold of top-p in rows with too many candidates to sort.

The counts of truncation_kernels.py say in which bins the threshold lies. The bins are counted again
in 256 finer ones, which leave some hundred tokens around the threshold. These are sorted, and with
the weight of all tokens below them, the rule of sampler.py applies to them exactly. Each pass over
the logits is shared by many programs. A row that these bounds miss, for example because of ties, is
left to the search in sampling_kernels.py.

Imported on machines with CUDA only. B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.decode.kernels.truncation_kernels import (
    BIN,
    BINS,
    CANDIDATES,
    MARGIN,
    largest,
    scaled,
    temperature_of,
)


@triton.jit
def _bins_of(x, top, first, last):
    """The bin of each token as in the first counts, and its finer bin within first..last."""
    distance = (top - x) / BIN
    distance = tl.where(distance < BINS - 1, distance, BINS - 1)
    fine = (distance - first) * (BINS / (last + 1 - first).to(tl.float32))
    fine = tl.minimum(tl.maximum(fine, 0.0), BINS - 1)
    return distance.to(tl.int32), fine.to(tl.int32)


@triton.jit
def _recount_kernel(
    logits,  # [B, V] float32
    temperatures,  # [B] float32
    maxima,  # [B, C] float32
    sums,  # [B, C] float32; of exp(x - the chunk's maximum)
    first_bins,  # [B] int32; the first bin that may hold the threshold, -1 = none is searched
    last_bins,  # [B] int32; the last one
    histograms,  # [B, C, BINS] int32; tokens by finer bin, to fill
    below,  # [B, C] float32; weight of tokens beyond the last bin, to fill
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    first = tl.load(first_bins + row)
    if first < 0:
        return
    last = tl.load(last_bins + row)
    top, _ = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits, row, at, temperature_of(temperatures, row), vocab)
    coarse, fine = _bins_of(x, top, first, last)
    place = row * num_chunks + chunk
    tl.store(below + place, tl.sum(tl.where(coarse > last, tl.exp(x - top), 0.0), 0))
    within = (coarse >= first) & (coarse <= last)
    counts = tl.histogram(fine, BINS, mask=within)
    tl.store(histograms + place * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _recut_kernel(
    top_ps,  # [B] float32
    maxima,
    sums,
    first_bins,
    last_bins,
    histograms,
    below,
    fine_bins,  # [B, 2] int32; first and last finer bin, to fill
    starts,  # [B, C] int32; uncertain tokens in earlier chunks, to fill
    num_uncertain,  # [B] int32; above CANDIDATES: too many, or none is searched; to fill
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    tl.store(num_uncertain + row, CANDIDATES + 1)
    first = tl.load(first_bins + row)
    if first < 0:
        return
    _, total = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    chunks, bins = tl.arange(0, CHUNKS_PAD), tl.arange(0, BINS)
    inside = chunks < num_chunks
    place = (row * num_chunks + chunks)[:, None] * BINS + bins[None, :]
    counts = tl.load(histograms + place, mask=inside[:, None], other=0)
    counted = tl.sum(counts, 0).to(tl.float32)
    rest = tl.sum(tl.load(below + row * num_chunks + chunks, mask=inside, other=0.0), 0)
    width = (tl.load(last_bins + row) + 1 - first).to(tl.float32) * (BIN / BINS)
    edge = first * BIN + bins.to(tl.float32) * width
    most = counted * tl.exp(-edge)
    least = counted * tl.exp(-edge - width)
    most = rest + tl.sum(most, 0) - tl.cumsum(most, 0)
    least = rest + tl.sum(least, 0) - tl.cumsum(least, 0)
    outside = (1.0 - tl.load(top_ps + row)) * total
    fine_last = tl.minimum(tl.sum((most > outside * MARGIN).to(tl.int32), 0), BINS - 1)
    fine_first = tl.minimum(tl.sum((least > outside / MARGIN).to(tl.int32), 0), fine_last)
    near = (bins >= fine_first) & (bins <= fine_last)
    number = tl.sum(tl.where(near[None, :], counts, 0), 1)
    tl.store(fine_bins + row * 2, fine_first)
    tl.store(fine_bins + row * 2 + 1, fine_last)
    tl.store(starts + row * num_chunks + chunks, tl.cumsum(number, 0) - number, mask=inside)
    tl.store(num_uncertain + row, tl.sum(number, 0))


@triton.jit
def _gather_kernel(
    logits,
    temperatures,
    maxima,
    sums,
    first_bins,
    last_bins,
    fine_bins,
    starts,
    num_uncertain,
    values,  # [B, CANDIDATES] float32; scaled logits of uncertain tokens, to fill
    below,  # [B, C] float32; weight of tokens below them, to fill
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(num_uncertain + row) > CANDIDATES:
        return
    first, last = tl.load(first_bins + row), tl.load(last_bins + row)
    fine_first, fine_last = tl.load(fine_bins + row * 2), tl.load(fine_bins + row * 2 + 1)
    top, _ = largest(maxima, sums, row, num_chunks, CHUNKS_PAD)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits, row, at, temperature_of(temperatures, row), vocab)
    coarse, fine = _bins_of(x, top, first, last)
    within = (coarse >= first) & (coarse <= last)
    is_below = (coarse > last) | (within & (fine > fine_last))
    place = row * num_chunks + chunk
    tl.store(below + place, tl.sum(tl.where(is_below, tl.exp(x - top), 0.0), 0))
    near = within & (fine >= fine_first) & (fine <= fine_last)
    number = near.to(tl.int32)
    to = row * CANDIDATES + tl.load(starts + place) + tl.cumsum(number, 0) - number
    tl.store(values + to, x, mask=near)


@triton.jit
def _nucleus_kernel(
    top_ps,
    min_ps,  # [B] float32; 0 = off
    maxima,
    sums,
    num_uncertain,
    values,
    below,
    thresholds,  # [B] float32; smallest scaled logit that stays, to fill
    is_found,  # [B] int32, to fill
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    tl.store(is_found + row, 0)
    number = tl.load(num_uncertain + row)
    if number > CANDIDATES:
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    inside, line = chunks < num_chunks, row * num_chunks + chunks
    # In float64, because the weight of one of many tokens is near the rounding of the sum.
    maximum = tl.load(maxima + line, mask=inside, other=-float("inf"))
    top = tl.max(maximum, 0)
    weight = tl.load(sums + line, mask=inside, other=0.0).to(tl.float64)
    total = tl.sum(weight * tl.exp((maximum - top).to(tl.float64)), 0)
    lighter = tl.sum(tl.load(below + line, mask=inside, other=0.0).to(tl.float64), 0)
    at = tl.arange(0, CANDIDATES)
    x = tl.load(values + row * CANDIDATES + at, mask=at < number, other=-float("inf"))
    ordered = tl.sort(x, descending=True)
    weight = tl.exp(ordered - top).to(tl.float64)
    uncertain = tl.sum(weight, 0)
    likelier = total - lighter - uncertain + tl.cumsum(weight, 0) - weight
    wanted = tl.load(top_ps + row).to(tl.float64) * total
    stays = (at < number) & (likelier < wanted)
    # The threshold lies among these tokens if the first of them stays and no other can.
    is_valid = (total - lighter - uncertain < wanted) & (total - lighter >= wanted) & (number > 0)
    threshold = tl.min(tl.where(stays, ordered, float("inf")), 0)
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    tl.store(thresholds + row, threshold)
    tl.store(is_found + row, is_valid.to(tl.int32))


def find_nuclei(
    logits: Tensor,  # [B, V] float32
    *,
    rules: tuple[Tensor, Tensor, Tensor, Tensor],  # [B] temperature, top-k, top-p, min-p
    summaries: tuple[Tensor, Tensor],  # [B, C] maxima, sums
    bins: tuple[Tensor, Tensor],  # [B] first, last
    histograms: Tensor,  # [B, C, BINS] int32, overwritten
    thresholds: Tensor,  # [B], to fill
    chunk: int,
) -> Tensor:
    """[B] int32: 1 for the rows whose threshold was found."""
    (num_rows, vocab), num_chunks = logits.shape, histograms.shape[1]
    temperatures, _, top_ps, min_ps = rules
    below = torch.empty_like(summaries[1])
    starts = torch.empty_like(below, dtype=torch.int32)
    fine_bins = starts.new_empty(num_rows, 2)
    num_uncertain, is_found = starts.new_empty(num_rows), starts.new_empty(num_rows)
    values = below.new_empty(num_rows, CANDIDATES.value)
    padded = triton.next_power_of_2(num_chunks)
    sizes = {"num_chunks": num_chunks, "CHUNKS_PAD": padded}
    pass_sizes = {"vocab": vocab, "CHUNK": chunk, **sizes}
    rows, chunks = (num_rows,), (num_rows, num_chunks)
    known = (temperatures, *summaries, *bins)
    _recount_kernel[chunks](logits, *known, histograms, below, **pass_sizes)
    cuts = (fine_bins, starts, num_uncertain)
    _recut_kernel[rows](top_ps, *summaries, *bins, histograms, below, *cuts, **sizes)
    _gather_kernel[chunks](logits, *known, *cuts, values, below, **pass_sizes)
    found = (num_uncertain, values, below, thresholds, is_found)
    _nucleus_kernel[rows](top_ps, min_ps, *summaries, *found, **sizes)
    return is_found
