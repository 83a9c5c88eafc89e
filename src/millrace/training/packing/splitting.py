"""Splits a microbatch that does not fit into memory, and joins those of several policies.

Promise: the halves train what the whole trained: every rollout is in exactly one of them, with all
rows it needs. Rows that rollouts of both halves share are in both. In a joined microbatch, rows
attend to what they attended to before, and trained tokens are in the order of the parts.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.errors import RunFailed
from millrace.core.microbatch import Batch, Microbatch, segment_order
from millrace.core.records import Kept

# Arrays with one row per trained token; some may be None.
_TOKEN_FIELDS = (
    *("targets", "engine_logprobs", "versions", "advantages", "temperatures"),
    *("reference_logprobs", "proximal_logprobs", "teacher_logprobs", "topk_ids", "topk_logprobs"),
    *("scores", "groups", "reported", "rewards", "values", "returns"),
)

MAX_GROUPS = 3  # of each joined part: roots, what is below them, and segments that share nothing


class RowLimit:
    """The largest number of rows that may still fit into memory. Used by one thread."""

    def __init__(self) -> None:
        self.most = sys.maxsize

    def fitting(self, batch: Batch) -> tuple[list[Microbatch], int]:
        """Microbatches split to meet the limit, and the number of splits."""
        waiting = list(batch.microbatches)[::-1]
        parts: list[Microbatch] = []
        num_splits = 0
        while waiting:
            part = waiting.pop()
            both = halves(part) if len(part.tokens) > self.most else None
            if both is None:
                parts.append(part)
            else:
                waiting += both[::-1]
                num_splits += 1
        return parts, num_splits

    def lower(self, part: Microbatch) -> None:
        """Lower the limit below `part`, which did not fit; raises RunFailed if it has no halves."""
        self.most = len(part.tokens) - 1
        if halves(part) is None:
            raise RunFailed(
                f"A sequence of {len(part.tokens)} tokens does not fit into the trainer's memory;"
                " set trainer.gradient_checkpointing to true, raise trainer.mesh.cp, or lower"
                " sampling.max_new_tokens"
                " (trainer.microbatch_tokens bounds several sequences together, not one)."
            )


def halves(whole: Microbatch) -> tuple[Microbatch, Microbatch] | None:
    """Two parts of about as many trained tokens; None if these are of one rollout or one group, or
    if there are none."""
    numbers = whole.rollouts if whole.groups is None else whole.groups
    if not len(numbers):
        return None
    second = np.searchsorted(numbers, numbers[0], side="right")  # end of the first one
    if second == len(numbers):
        return None
    begin_of_second = max(numbers[second], numbers[len(numbers) // 2])
    is_first = numbers < begin_of_second
    return _part(whole, is_first), _part(whole, ~is_first)


def by_rollout(whole: Microbatch) -> list[Microbatch]:
    return [_part(whole, whole.rollouts == number) for number in np.unique(whole.rollouts)]


def placeholder(like: Microbatch) -> Microbatch:
    """A microbatch of one row and no trained tokens, for a rank that has fewer than the others: it
    takes part in their collectives and adds nothing to the gradient."""
    one = np.ones(1, np.int32)
    return dataclasses.replace(
        like,
        tokens=like.tokens[:1],
        positions=like.positions[:1],
        lengths=one,
        parents=-one,
        predictors=like.predictors[:0],
        rollouts=like.rollouts[:0],
        kept=None,
        routes=None if like.routes is None else like.routes[:1],
        last_rows=None if like.last_rows is None else like.last_rows[:0],
        **_token_fields(like, slice(0)),
    )


def _part(whole: Microbatch, chosen: np.ndarray) -> Microbatch:
    """The microbatch of the trained tokens where `chosen` [N] is True."""
    segment_of_row = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
    rollouts = whole.rollouts[chosen]
    used_rows = whole.predictors[chosen]
    last_rows = None if whole.last_rows is None else whole.last_rows[np.unique(rollouts)]
    if last_rows is not None:
        used_rows = np.concatenate([used_rows, last_rows[last_rows >= 0]])
    segments = _in_order(whole, np.unique(segment_of_row[used_rows]))
    rows = np.concatenate([np.flatnonzero(segment_of_row == segment) for segment in segments])
    new_row = np.full(len(whole.tokens) + 1, -1, np.int32)  # its last entry: row -1
    new_row[rows] = np.arange(len(rows))
    new_segment = np.full(len(whole.lengths) + 1, -1, np.int32)  # its last entry: parent -1
    new_segment[segments] = np.arange(len(segments))
    return dataclasses.replace(
        whole,
        tokens=whole.tokens[rows],
        positions=whole.positions[rows],
        lengths=whole.lengths[segments],
        parents=new_segment[whole.parents[segments]],
        predictors=new_row[whole.predictors[chosen]],
        rollouts=rollouts - rollouts[0],
        kept=None if whole.kept is None else kept_rows(whole.kept, chosen),
        routes=None if whole.routes is None else whole.routes[rows],
        last_rows=None if last_rows is None else new_row[last_rows],
        **_token_fields(whole, chosen),
    )


def _token_fields(whole: Microbatch, chosen: np.ndarray | slice) -> dict[str, Any]:
    values = {name: getattr(whole, name) for name in _TOKEN_FIELDS}
    return {name: None if value is None else value[chosen] for name, value in values.items()}


def _in_order(whole: Microbatch, used: np.ndarray) -> np.ndarray:
    """`used` segments and those that they continue, in the order of a microbatch."""
    above = used
    while (above := whole.parents[above]).max(initial=-1) >= 0:
        above = above[above >= 0]
        used = np.union1d(used, above)
    parents = whole.parents[used]
    return used[segment_order(np.where(parents >= 0, np.searchsorted(used, parents), -1))]


def kept_rows(kept: Kept, chosen: np.ndarray) -> Kept:
    """The rows where `chosen` [N] is True."""
    sizes = np.diff(kept.offsets)
    offsets = np.cumsum([0, *sizes[chosen]])
    return Kept(ids=kept.ids[np.repeat(chosen, sizes)], offsets=offsets)


def join_kept(parts: Sequence[tuple[Kept | None, int]]) -> Kept | None:
    """The rows of all parts, each with its number of them; a part without kept ids has empty rows,
    which mean that all ids were kept."""
    if all(kept is None for kept, _ in parts):
        return None
    sizes = [np.zeros(n, np.int64) if kept is None else np.diff(kept.offsets) for kept, n in parts]
    ids = np.concatenate([kept.ids for kept, _ in parts if kept is not None])
    return Kept(ids=ids, offsets=np.cumsum(np.concatenate([[0], *sizes])))


def joined(parts: Sequence[Microbatch]) -> tuple[Microbatch, list[tuple[int, int]]]:
    """The microbatch of all parts, without routes, and its groups of rows in order: the number of a
    part, and how many rows of it follow."""

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    def shifted(name: str, sizes: Sequence[int]) -> np.ndarray:
        """Numbers within each part as numbers within all; -1 stays."""
        begins = np.cumsum([0, *sizes[:-1]])
        own = [getattr(part, name) for part in parts]
        return np.concatenate(
            [np.where(n < 0, -1, n + begin) for n, begin in zip(own, begins, strict=True)]
        )

    lengths, parents = all_of("lengths"), shifted("parents", [len(p.lengths) for p in parts])
    predictors = shifted("predictors", [len(p.tokens) for p in parts])
    segments = segment_order(parents)
    new_segment = np.empty_like(segments)
    new_segment[segments] = np.arange(len(segments))
    rows = np.argsort(np.repeat(new_segment, lengths), kind="stable")
    new_row = np.empty_like(rows)
    new_row[rows] = np.arange(len(rows))
    owners = np.repeat(np.arange(len(parts)), [len(part.tokens) for part in parts])[rows]
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    counts = np.diff(begins, append=len(owners))
    whole = Microbatch(
        tokens=all_of("tokens")[rows],
        positions=all_of("positions")[rows],
        lengths=lengths[segments],
        parents=np.where(parents >= 0, new_segment[parents], -1)[segments],
        predictors=new_row[predictors],
        targets=all_of("targets"),
        rollouts=all_of("rollouts"),
        engine_logprobs=all_of("engine_logprobs"),
        versions=all_of("versions"),
        advantages=all_of("advantages"),
        temperatures=all_of("temperatures"),
        kept=join_kept([(part.kept, len(part.targets)) for part in parts]),
    )
    return whole, [*zip(owners[begins].tolist(), counts.tolist(), strict=True)]
