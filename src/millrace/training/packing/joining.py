"""Joins the optional arrays of rollouts for the microbatch they are packed into. Pure numpy.

T = rows of the microbatch.
"""

from collections.abc import Sequence

import numpy as np

from millrace.core.completions import unknown_routes
from millrace.core.records import Kept, Rollout


def join_routes(
    by_segment: Sequence[np.ndarray | None], lengths: np.ndarray
) -> np.ndarray | None:  # [T, layers, top_k]
    """Rows of segments without routes are marked unknown; None if no segment has any."""
    like = next((routes for routes in by_segment if routes is not None), None)
    if like is None:
        return None
    return np.concatenate(
        [
            unknown_routes(int(length), like=like) if routes is None else routes
            for routes, length in zip(by_segment, lengths, strict=True)
        ]
    )


def join_kept(rollouts: Sequence[Rollout]) -> Kept | None:
    if all(rollout.kept is None for rollout in rollouts):
        return None
    # Rows of untrained tokens are empty.
    ids = [rollout.kept.ids for rollout in rollouts if rollout.kept is not None]
    sizes = [
        np.zeros(r.num_sampled, np.int64) if r.kept is None else np.diff(r.kept.offsets)[r.mask]
        for r in rollouts
    ]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return Kept(ids=np.concatenate(ids), offsets=offsets)


def join_references(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    found = [r.reference_logprobs[r.mask] for r in rollouts if r.reference_logprobs is not None]
    if not found:
        return None
    assert len(found) == len(rollouts), "either all rollouts of a run have a reference, or none"
    return np.concatenate(found)


def join_teachers(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Teacher logprobs of the trained tokens; NaN where a token has no teacher."""
    if all(rollout.teacher is None for rollout in rollouts):
        return {}
    widths = {t.top_ids.shape[1] for r in rollouts if (t := r.teacher) and t.top_ids is not None}
    assert len(widths) <= 1, "all teachers of a run give the same number of ids per token"
    num_topk = widths.pop() if widths else 0
    logprobs: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    topk: list[np.ndarray] = []
    for rollout in rollouts:
        teacher, mask, count = rollout.teacher, rollout.mask, rollout.num_sampled
        if teacher is None:
            logprobs.append(np.full(count, np.nan, np.float32))
            ids.append(np.tile(np.arange(num_topk, dtype=np.int32), (count, 1)))
            topk.append(np.full((count, num_topk), np.nan, np.float32))
            continue
        logprobs.append(teacher.logprobs[mask])
        if teacher.top_ids is not None and teacher.top_logprobs is not None:
            ids.append(teacher.top_ids[mask])
            topk.append(teacher.top_logprobs[mask])
    joined = {"teacher_logprobs": np.concatenate(logprobs)}
    if num_topk:
        joined |= {"topk_ids": np.concatenate(ids), "topk_logprobs": np.concatenate(topk)}
    return joined
