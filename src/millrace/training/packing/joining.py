"""Joins microbatches of several policies for one forward pass.

Promise: rows attend to what they attended to before, and the trained tokens of the parts follow
each other in the order of the parts.
"""

from collections.abc import Sequence

import numpy as np

from millrace.core.microbatch import Microbatch, segment_order
from millrace.training.packing.splitting import join_kept

MAX_GROUPS = 3  # of each part: roots, what is below them, and segments that share nothing


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
