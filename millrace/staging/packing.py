"""Lays the rollouts of a batch end to end into microbatches under a token budget.

Promise: every rollout lands in exactly one microbatch, whole and unpadded; no microbatch exceeds
the budget unless a single rollout does. Pure numpy, so the controller can run it in a thread.
"""

import bisect
from collections.abc import Sequence

import numpy as np

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Group, Kept, Rollout


def pack(groups: Sequence[Group], *, microbatch_tokens: int) -> Batch:
    """One optimizer step's worth of microbatches from scored groups."""
    rows = [row for group in groups for row in _rows(group)]
    bins = fill_bins([len(rollout.tokens) for rollout, _ in rows], budget=microbatch_tokens)
    return Batch(
        microbatches=tuple(_lay_out([rows[i] for i in bin_]) for bin_ in bins),
        num_sequences=len(rows),
        num_trained_tokens=sum(rollout.num_sampled for rollout, _ in rows),
    )


def fill_bins(sizes: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices of `sizes` in as few bins as best-fit-decreasing finds; an oversized one sits
    alone."""
    bins: list[list[int]] = []
    by_room: list[
        tuple[int, int]
    ] = []  # (room left, bin), ascending: the first that fits is the best
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


def _rows(group: Group) -> list[tuple[Rollout, float]]:
    """Each rollout of a group with the advantage of its episode."""
    assert group.advantages is not None, "a group is scored before it is packed"
    return [
        (rollout, float(advantage))
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        for rollout in episode.rollouts
    ]


def _lay_out(rows: Sequence[tuple[Rollout, float]]) -> Microbatch:
    rollouts = [rollout for rollout, _ in rows]
    lengths = np.array([len(rollout.tokens) for rollout in rollouts], np.int32)
    mask = np.concatenate([rollout.mask for rollout in rollouts])
    advantages = np.repeat(np.array([a for _, a in rows], np.float32), lengths)
    temperatures = [rollout.sampling.temperature for rollout in rollouts]
    return Microbatch(
        tokens=np.concatenate([rollout.tokens for rollout in rollouts]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        lengths=lengths,
        mask=mask,
        engine_logprobs=np.concatenate([rollout.engine_logprobs for rollout in rollouts]),
        versions=np.concatenate([rollout.versions for rollout in rollouts]),
        advantages=np.where(mask, advantages, np.float32(0)),
        temperatures=np.repeat(np.array(temperatures, np.float32), lengths),
        kept=_join_kept(rollouts),
    )


def _join_kept(rollouts: Sequence[Rollout]) -> Kept | None:
    if all(rollout.kept is None for rollout in rollouts):
        return None
    ids: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for rollout in rollouts:
        if rollout.kept is None:
            sizes.append(np.zeros(len(rollout.tokens), np.int64))
        else:
            ids.append(rollout.kept.ids)
            sizes.append(np.diff(rollout.kept.offsets))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return Kept(ids=np.concatenate(ids), offsets=offsets)
