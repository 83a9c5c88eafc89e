"""Splits of contexts: how the attention of a decode step is divided into programs.

A row with a long context would outlast all others, and few rows would leave most of a GPU idle. So
a context is split, and the parts attend side by side and are joined. The host plans this once per
launch; the tensors are read by CUDA graphs that were captured for a number of splits.

B = rows, S = splits of all rows.
"""

import numpy as np

_FILLING = 512  # programs that keep a GPU busy, about
_FINE = 4096  # programs among which no one is long, if contexts are long
_LEAST_TOKENS = 64  # of a split, if programs are few
_SPLIT_TOKENS = 1024  # of a split, about, if they are many
_MANY_SPLITS = 64  # beyond one per row are planned, or 128 and so on: steps are captured for each


def num_splits_of(counts: np.ndarray, *, num_rows: int, num_heads: int) -> int:
    """S for a plan in which the first rows have these counts of splits [R]."""
    extra = int(counts.sum()) - len(counts)
    least = 0 if _fills(num_rows, num_heads) else _FILLING // num_heads
    if extra <= least:
        return num_rows + least
    return num_rows + max(_MANY_SPLITS, 1 << (extra - 1).bit_length())


def max_splits(*, num_rows: int, num_heads: int) -> int:
    """The largest S for this many rows."""
    return num_rows + max(_MANY_SPLITS, 2 * _FINE // num_heads)


def split_counts(lengths: np.ndarray, *, num_rows: int, num_heads: int) -> np.ndarray:
    """Splits [R] of rows with contexts of these lengths [R], in steps of B rows, each with
    `num_heads` KV heads: enough to fill the GPU and to keep a long row from outlasting others."""
    work = int(lengths.sum()) * num_heads
    if _fills(num_rows, num_heads):
        tokens = max(_SPLIT_TOKENS, -(-work // _FINE))
        is_split = lengths >= 2 * tokens
    else:
        tokens = max(_LEAST_TOKENS, -(-work // _FILLING))
        if tokens > _SPLIT_TOKENS:
            tokens = max(_SPLIT_TOKENS, -(-work // _FINE))
        is_split = lengths > tokens
    return np.where(is_split, -(-lengths // tokens), 1)


def plan_splits(counts: np.ndarray, *, num_rows: int, num_splits: int) -> np.ndarray:
    """The programs of a launch in which the first rows have these counts of splits [R]: [S, 4]
    int32, largest first: row, number of the split, splits of the row (0 = there is nothing to do),
    place of its part among all parts, where those of a row are neighbours."""
    counts = np.concatenate([counts, np.ones(num_rows - len(counts), dtype=np.int64)])
    rows = np.repeat(np.arange(num_rows), counts)
    firsts = np.cumsum(counts) - counts
    places = np.arange(len(rows))
    columns = (rows, places - firsts[rows], counts[rows], places)
    # Those of long rows first, so that none of them begins when all others have ended.
    order = np.argsort(-counts[rows], kind="stable")
    splits = np.zeros((num_splits, 4), dtype=np.int32)
    splits[: len(rows)] = np.stack(columns, axis=1)[order]
    return splits


def _fills(num_rows: int, num_heads: int) -> bool:
    """Whether rows without splits fill the GPU."""
    return 2 * num_rows * num_heads > _FILLING
