"""The layout of a packed microbatch: which rows attend to which.

It is made once per microbatch and used by every layer, in two forms for two kinds of kernels:
- calls with spans of rows, for variable-length kernels;
- blocks, for attention over padded rectangles; every row is a query in exactly one block. They are
  built when the first layer needs them.
Layers with a recurrent state use a third one, whole sequences.

A segment attends to its own earlier rows and to all rows of its path: its parent, the parent of
that one, and so on. The order of segments is that of a microbatch (see core/microbatch.py): what is
below a segment is contiguous.

T = rows, S = segments, b = rectangles of a block, Q and K = queries and keys of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.core.microbatch import segment_order

FLASH_CAPABILITY = (8, 0)  # Ampere, the first that PyTorch's flash kernel supports
_MIN_FILL = 0.75  # of a block: a sequence shorter than this share of the longest starts another
_TREE_ROWS = 128  # trees of at most this size are computed whole, with a mask


class ScoreRules(NamedTuple):
    """How attention computes scores. A NamedTuple, because torch.compile looks through it."""

    scale: float
    window: int | None = None  # keys that a query attends to, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]; one more score per head, whose value is 0
    chunk: int | None = None  # positions of a chunk; a query attends to keys of its own

    @property
    def is_plain(self) -> bool:
        """Whether scores, apart from a window, are those of scaled_dot_product_attention()."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """b rectangles of Q queries and K keys. Without a mask query i attends to keys to K - Q + i."""

    shape: tuple[int, int, int]  # b, Q, K
    # [b, 1, Q, Q] int16, of trees: position of the query minus that of the key, -1 = masked.
    behind: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """All blocks, and the row of each of their queries and keys, end to end."""

    blocks: tuple[Block, ...]
    row_of_query: Tensor  # [sum of b * Q] int64; padding points at row 0
    query_of_row: Tensor  # [T] int64
    is_padding: Tensor  # [sum of b * Q] bool
    # [sum of b * K] int64; None = the keys of every block are its queries
    row_of_key: Tensor | None


class FlatCalls(NamedTuple):
    """The calls of a variable-length kernel, as three tensors: an operator takes no objects, and a
    compiled layer must not depend on the number of calls. Call 0 is every segment with itself. Call
    n is all rows below a segment at depth n - 1 with that segment."""

    bounds: Tensor  # int32; of the spans of keys of call 0, those of queries, then of call 1, ...
    rows: Tensor  # int64; of keys and queries that are not contiguous, in the same order
    # [calls, 7] int64, on the host: number of spans; the longest span of keys, and of queries; the
    # first row of keys, or -1 = in `rows`, and their number; the same for queries.
    table: Tensor


class ChunkedRows(NamedTuple):
    """A layout in which rows attend within chunks of the context, with the rows in another order:
    those of a segment in several chunks belong to several segments."""

    layout: "PackedLayout"
    order: Tensor  # [T] int64; the row of each row of the layout
    inverse: Tensor  # [T] int64


class PackedLayout:
    """Used by one thread."""

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        parents: Sequence[int] | np.ndarray | None = None,
        device: torch.device,
    ) -> None:
        """The layout of segments of these lengths, in order; without `parents` none has one."""
        lengths = np.asarray(lengths, np.int64)
        parents = np.full(len(lengths), -1) if parents is None else np.asarray(parents, np.int64)
        self.lengths, self.parents = lengths, parents
        self.num_rows = int(lengths.sum())
        self._device = device
        self._by_chunk: dict[int, ChunkedRows] = {}
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._below = _numbers_below(parents)
        self.first_positions = np.zeros(len(lengths), np.int64)  # of each segment
        depths = np.zeros(len(lengths), np.int64)
        for segments, above in _ancestors(parents):
            self.first_positions[segments] += lengths[above]
            depths[segments] += 1
        is_shared = np.diff(self._below).ravel() > 0
        levels = range(int(depths[is_shared].max(initial=-1)) + 1)
        # A plain attribute, because compiled layers read it.
        self.calls = self._flat_calls([np.flatnonzero(is_shared & (depths == n)) for n in levels])
        self.shares_rows = bool(levels)
        # The most rows that any row attends to, itself included.
        self.longest = int((lengths + self.first_positions).max())
        self.on_flash_gpu = (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
        )

    def _flat_calls(self, levels: Sequence[np.ndarray]) -> FlatCalls:
        own = np.stack([self._starts[:-1], self._starts[1:]])
        calls = [(own, own)]
        calls += [(own[:, shared], self._starts[self._below[shared]].T) for shared in levels]
        bounds, rows, table = [], [np.empty(0, np.int64)], []
        for spans in calls:
            lengths = [ends - begins for begins, ends in spans]
            row = [len(lengths[0]), *(int(part.max()) for part in lengths)]
            for (begins, ends), part in zip(spans, lengths, strict=True):
                bounds += [[0], np.cumsum(part)]
                touch = np.array_equal(begins[1:], ends[:-1])
                row += [int(begins[0]) if touch else -1, int(part.sum())]
                rows += [] if touch else map(np.arange, begins, ends)
            table.append(row)
        return FlatCalls(
            bounds=self._tensor(np.concatenate(bounds).astype(np.int32)),
            rows=self._tensor(np.concatenate(rows)),
            table=torch.tensor(table),
        )

    @cached_property
    def blocks(self) -> Blocks:
        parts = [*self._tree_blocks(), *self._row_blocks()]
        queries = [queries for _, queries, _ in parts]
        keys = [keys for _, _, keys in parts]
        row_of_query = np.concatenate([rows.ravel() for rows in queries])
        is_padding = row_of_query < 0
        query_of_row = np.empty(self.num_rows, np.int64)
        query_of_row[row_of_query[~is_padding]] = np.flatnonzero(~is_padding)
        repeats = any(k is not q for q, k in zip(queries, keys, strict=True))
        row_of_key = np.concatenate([rows.ravel() for rows in keys]).clip(0) if repeats else None
        return Blocks(
            blocks=tuple(block for block, _, _ in parts),
            row_of_query=self._tensor(row_of_query.clip(0)),
            query_of_row=self._tensor(query_of_row),
            is_padding=self._tensor(is_padding),
            row_of_key=None if row_of_key is None else self._tensor(row_of_key),
        )

    def chunked(self, size: int) -> ChunkedRows:
        """The layout for layers that attend within chunks of `size` positions."""
        if size not in self._by_chunk:
            self._by_chunk[size] = self._chunked(size)
        return self._by_chunk[size]

    def _chunked(self, size: int) -> ChunkedRows:
        spans: list[np.ndarray] = []  # rows of each part of a segment
        parents: list[int] = []
        lasts: list[int] = []  # the last part of each segment
        for segment, first in enumerate(self.first_positions.tolist()):
            rows, above = self._rows(segment), int(self.parents[segment])
            cuts = np.arange((first // size + 1) * size, first + len(rows), size) - first
            continues = above >= 0 and first % size > 0
            parents += [lasts[above] if continues else -1, *[-1] * len(cuts)]
            spans += np.split(rows, cuts)
            lasts.append(len(spans) - 1)
        order = _tree_by_tree(np.array(parents))
        number = np.argsort(order)
        above = np.array(parents)[order]
        rows = np.concatenate([spans[n] for n in order])
        layout = PackedLayout(
            [len(spans[n]) for n in order],
            parents=np.where(above >= 0, number[above], -1),
            device=self._device,
        )
        return ChunkedRows(layout, self._tensor(rows), self._tensor(np.argsort(rows)))

    @cached_property
    def sequences(self) -> tuple[list[Tensor], Tensor]:
        """Every path that no segment continues, in groups that are padded at the end to equal
        lengths: their rows [b, L] int64, where padding points at row 0, and a place [T] int64 of
        each row in all groups end to end."""
        ends = np.flatnonzero(np.diff(self._below).ravel() == 0)
        whole = [self.path(n) for n in ends.tolist()]
        groups: list[np.ndarray] = []
        place_of_row, start = np.empty(self.num_rows, np.int64), 0
        for members in bucketed(np.array([len(rows) for rows in whole])):
            longest = len(whole[members[0]])
            groups.append(_padded([whole[i] for i in members], longest))
            for number, i in enumerate(members):
                begin = start + number * longest
                place_of_row[whole[i]] = np.arange(begin, begin + len(whole[i]))
            start += groups[-1].size
        return [self._tensor(rows.clip(0)) for rows in groups], self._tensor(place_of_row)

    def _tree_blocks(self) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Small trees whole: with few queries, a mask is cheaper than repeated keys."""
        trees = [
            np.concatenate([self._rows(root), np.arange(*self._starts[self._below[root]])])
            for root in self._small_trees
        ]
        sizes = np.array([len(rows) for rows in trees], np.int64)
        for members in bucketed(sizes):
            longest = int(sizes[members[0]])
            rows = _padded([trees[i] for i in members], longest)  # [b, Q]
            behind = self._tensor(self._behind(rows)[:, None])
            yield Block(shape=(*rows.shape, longest), behind=behind), rows, rows

    def _row_blocks(self) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Segments outside of small trees: by parent, then by length."""
        is_left = np.ones(len(self.lengths), bool)
        for root in self._small_trees:
            is_left[root] = is_left[slice(*self._below[root])] = False
        for parent in np.unique(self.parents[is_left]):
            members = np.flatnonzero(is_left & (self.parents == parent))
            for bucket in bucketed(self.lengths[members]):
                chosen = members[bucket]
                longest = int(self.lengths[chosen].max())
                queries = _padded([self._rows(n) for n in chosen], longest)  # [b, Q]
                keys = queries
                if parent >= 0:
                    shared = np.tile(self.path(parent), (len(chosen), 1))
                    keys = np.concatenate([shared, queries], axis=1)  # [b, K]
                yield Block(shape=(*queries.shape, keys.shape[1])), queries, keys

    def _behind(self, rows: np.ndarray) -> np.ndarray:
        """Block.behind [b, Q, Q] int16 for rows [b, Q] of trees."""
        is_real = rows >= 0
        segment_of_row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        real = segment_of_row[rows]  # arbitrary for padding
        position = np.where(is_real, rows - self._starts[real] + self.first_positions[real], 0)
        alone = -2 - np.arange(rows.shape[1])  # each padding row is a segment of its own
        segment = np.where(is_real, real, alone)
        first, last = (np.where(is_real, self._below[real, i], 0) for i in (0, 1))
        behind = position[:, :, None] - position[:, None, :]
        same = segment[:, :, None] == segment[:, None, :]
        continued = first[:, None, :] <= segment[:, :, None]
        continued &= segment[:, :, None] < last[:, None, :]
        return np.where((same & (behind >= 0)) | continued, behind, -1).astype(np.int16)

    @cached_property
    def _small_trees(self) -> list[int]:
        """The roots of trees that are computed whole."""
        first, last = self._below.T
        sizes = self.lengths + self._starts[last] - self._starts[first]
        is_root = (self.parents < 0) & (last > first)
        return np.flatnonzero(is_root & (sizes <= _TREE_ROWS)).tolist()

    def _rows(self, segment: int) -> np.ndarray:
        return np.arange(self._starts[segment], self._starts[segment + 1])

    def path(self, segment: int) -> np.ndarray:
        """The rows that the last row of a segment attends to."""
        parts = [self._rows(segment)]
        while (segment := self.parents[segment]) >= 0:
            parts.append(self._rows(segment))
        return np.concatenate(parts[::-1])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _ancestors(parents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Segments and a segment that each continues: their parents, then those of these, and so on."""
    segments = np.flatnonzero(parents >= 0)
    above = parents[segments]
    while len(segments):
        yield segments, above
        is_deeper = parents[above] >= 0
        segments, above = segments[is_deeper], parents[above[is_deeper]]


def _tree_by_tree(parents: np.ndarray) -> np.ndarray:
    """The order of a microbatch for segments whose trees may be interleaved."""
    roots = np.arange(len(parents))
    for segment in np.flatnonzero(parents >= 0):
        roots[segment] = roots[parents[segment]]
    together = np.argsort(roots, kind="stable")
    above = parents[together]
    return together[segment_order(np.where(above >= 0, np.argsort(together)[above], -1))]


def _numbers_below(parents: np.ndarray) -> np.ndarray:  # [S, 2] int64
    """The first number of the segments below each, and the one after the last."""
    first, last = np.full(len(parents), len(parents)), np.zeros(len(parents), np.int64)
    counts = np.zeros(len(parents), np.int64)
    for segments, above in _ancestors(parents):
        np.minimum.at(first, above, segments)
        np.maximum.at(last, above, segments + 1)
        np.add.at(counts, above, 1)
    has_any = counts > 0
    in_place = (parents < 0) | (first == np.arange(len(parents)) + 1)  # depth first
    in_place &= last - first == counts
    assert in_place[has_any].all(), "what is below a segment is contiguous"
    return np.where(has_any[:, None], np.stack([first, last], axis=1), 0)


def bucketed(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of indices that are padded to the same length, longest first."""
    order = np.argsort(-lengths, kind="stable")
    buckets: list[np.ndarray] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] < _MIN_FILL * lengths[order[begin]]:
            buckets.append(order[begin:end])
            begin = end
    return buckets


def _padded(rows: Sequence[np.ndarray], longest: int) -> np.ndarray:
    """[b, longest] int64, padded with -1."""
    padded = np.full((len(rows), longest), -1, np.int64)
    for target, source in zip(padded, rows, strict=True):
        target[: len(source)] = source
    return padded
