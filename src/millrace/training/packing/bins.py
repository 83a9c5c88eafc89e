"""Bins of a token budget: which items share a microbatch, and which rank gets it."""

import bisect
import math
from collections.abc import Sequence


def fill_bins(sizes: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices of `sizes` in bins, by best fit decreasing; an oversized item has its own bin."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (room left, bin), ascending: the first fit is the best
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        slot = bisect.bisect_left(by_room, (sizes[index], -1))
        if slot < len(by_room):
            room, chosen = by_room.pop(slot)
            bins[chosen].append(index)
        else:
            room, chosen = budget, len(bins)
            bins.append([index])
        bisect.insort(by_room, (room - sizes[index], chosen))
    return bins


def fill_rank_bins(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, num_ranks: int
) -> list[list[list[int]]]:
    """Returns a list of bins of indices for each rank; all have equally many, some may be empty.
    Ranks run in lockstep: in a sharded model they meet in every layer of every microbatch. So bins
    of similar cost have the same position in all ranks, and the sums of the ranks are close."""
    per_rank = math.ceil(len(fill_bins(sizes, budget=budget)) / num_ranks)
    while (bins := _spread(sizes, costs, budget=budget, num_bins=per_rank * num_ranks)) is None:
        per_rank += 1
    bins.sort(key=lambda bin_: -sum(costs[i] for i in bin_))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for position in range(per_rank):
        together = bins[position * num_ranks : (position + 1) * num_ranks]
        # The costliest bin of a position goes to the rank that has the least so far.
        load = [sum(costs[i] for bin_ in rank for i in bin_) for rank in ranks]
        order = sorted(range(num_ranks), key=load.__getitem__)
        for rank, bin_ in zip(order, together, strict=True):
            ranks[rank].append(bin_)
    return ranks


def _spread(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, num_bins: int
) -> list[list[int]] | None:
    """Each item, the costliest first, in the cheapest bin that has room; None if one has none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    bin_sizes, bin_costs = [0] * num_bins, [0.0] * num_bins
    for index in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        fitting = [
            n for n in range(num_bins) if not bins[n] or bin_sizes[n] + sizes[index] <= budget
        ]
        if not fitting:
            return None
        chosen = min(fitting, key=bin_costs.__getitem__)
        bins[chosen].append(index)
        bin_sizes[chosen] += sizes[index]
        bin_costs[chosen] += costs[index]
    return bins
