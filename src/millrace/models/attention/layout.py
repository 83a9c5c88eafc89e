"""The layout of a packed microbatch: which rows attend to which.

It is made once per microbatch and used by every layer, in two forms for two kinds of kernels:
- spans, for variable-length kernels;
- blocks, for attention over padded rectangles; every row is a query in exactly one block. They are
  built when the first layer needs them.
Layers with a recurrent state use a third one, whole sequences.

A segment that continues a shared prefix has that prefix as its parent: it attends to all rows of
the parent and to its own earlier rows. A parent and its children are a family. Parents come first,
then their children in the order of the parents, then other segments (see core/microbatch.py).

T = rows, S = segments, b = rectangles of a block, Q and K = queries and keys of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FLASH_CAPABILITY = (8, 0)  # Ampere, the first that PyTorch's flash kernel supports
_MIN_FILL = 0.75  # of a block: a sequence shorter than this share of the longest starts another
_TREE_ROWS = 128  # families of at most this size are computed whole, with a mask


class ScoreRules(NamedTuple):
    """How attention computes scores. A NamedTuple, because torch.compile looks through it."""

    scale: float
    window: int | None = None  # keys that a query attends to, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]; one more score per head, whose value is 0

    @property
    def is_plain(self) -> bool:
        """Whether scores, apart from a window, are those of scaled_dot_product_attention()."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """b rectangles of Q queries and K keys. Without a mask query i attends to keys to K - Q + i."""

    shape: tuple[int, int, int]  # b, Q, K
    mask: "TreeMask | None" = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreeMask:
    """Attention masks of the families of a block; all [b, 1, Q, Q]."""

    behind: Tensor  # int16; position of the query minus that of the key, -1 = masked
    bias: Tensor  # float32; 0 or -inf = masked


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """All blocks, and the row of each of their queries and keys, end to end."""

    blocks: tuple[Block, ...]
    row_of_query: Tensor  # [sum of b * Q] int64; padding points at row 0
    query_of_row: Tensor  # [T] int64
    is_padding: Tensor  # [sum of b * Q] bool
    # [sum of b * K] int64; None = the keys of every block are its queries
    row_of_key: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """Span i holds the rows from bounds[i] to bounds[i + 1] (cu_seqlens)."""

    bounds: Tensor  # [spans + 1] int32
    longest: int
    num_rows: int = 0  # of all spans

    @classmethod
    def of(cls, lengths: np.ndarray, *, device: torch.device) -> "Spans":
        ends = np.cumsum(lengths)
        bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device)
        return cls(bounds=bounds, longest=int(lengths.max()), num_rows=int(ends[-1]))


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
        self.num_parents = int(parents.max(initial=-1)) + 1
        is_child = parents >= 0
        children = slice(self.num_parents, self.num_parents + int(is_child.sum()))
        assert is_child[children].all(), "children come right behind the parents"
        assert (np.diff(parents[children]) >= 0).all(), "children lie in the order of the parents"
        self._device = device
        self._starts = np.cumsum(lengths) - lengths
        # Plain attributes, because compiled layers read them.
        self.segments = Spans.of(lengths, device=device)
        # One span per parent, and one per parent of all its children, which come next.
        self.families: tuple[Spans, Spans] | None = None
        if self.num_parents:
            owned = np.bincount(parents[is_child], weights=lengths[children]).astype(np.int64)
            shared = lengths[: self.num_parents]
            self.families = Spans.of(shared, device=device), Spans.of(owned, device=device)
        # The most rows that any row attends to, itself included.
        self.longest = int((lengths + np.where(is_child, lengths[parents], 0)).max())
        self.on_flash_gpu = (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
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

    @cached_property
    def sequences(self) -> tuple[list[Tensor], Tensor]:
        """Every segment behind its parent, in groups that are padded at the end to equal lengths:
        their rows [b, L] int64, where padding points at row 0, and the place [T] int64 of each row
        in all groups end to end."""
        whole = [self.rows_with_parent(n) for n in range(len(self.lengths))]
        groups: list[np.ndarray] = []
        place_of_row, start = np.empty(self.num_rows, np.int64), 0
        for members in bucketed(np.array([len(rows) for rows in whole])):
            longest = len(whole[members[0]])
            groups.append(_padded([whole[n] for n in members], longest))
            for number, n in enumerate(members):
                own = np.arange(len(whole[n]) - int(self.lengths[n]), len(whole[n]))
                place_of_row[self._rows(n)] = start + number * longest + own
            start += groups[-1].size
        return [self._tensor(rows.clip(0)) for rows in groups], self._tensor(place_of_row)

    def _tree_blocks(self) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Small families whole: with few queries, a mask is cheaper than repeated keys."""
        families = [
            np.concatenate([self._rows(n) for n in (parent, *self._children(parent))])
            for parent in self._small_families
        ]
        sizes = np.array([len(rows) for rows in families], np.int64)
        for members in bucketed(sizes):
            longest = int(sizes[members[0]])
            rows = _padded([families[i] for i in members], longest)  # [b, Q]
            behind = self._behind(rows)[:, None]
            bias = np.where(behind < 0, -np.inf, 0).astype(np.float32)
            mask = TreeMask(behind=self._tensor(behind), bias=self._tensor(bias))
            yield Block(shape=(*rows.shape, longest), mask=mask), rows, rows

    def _row_blocks(self) -> Iterator[tuple[Block, np.ndarray, np.ndarray]]:
        """Segments without parents by length; children of large families by parent, then length."""
        small = set(self._small_families)
        numbers = np.arange(len(self.lengths))
        alone = [n for n in numbers if self.parents[n] < 0 and n not in small]
        large = [n for n in range(self.num_parents) if n not in small]
        for parent, members in [(-1, alone), *((n, self._children(n)) for n in large)]:
            members = np.asarray(members, np.int64)
            for bucket in bucketed(self.lengths[members]):
                chosen = members[bucket]
                longest = int(self.lengths[chosen].max())
                queries = _padded([self._rows(n) for n in chosen], longest)  # [b, Q]
                keys = queries
                if parent >= 0:
                    shared = np.tile(self._rows(parent), (len(chosen), 1))
                    keys = np.concatenate([shared, queries], axis=1)  # [b, K]
                yield Block(shape=(*queries.shape, keys.shape[1])), queries, keys

    def _behind(self, rows: np.ndarray) -> np.ndarray:
        """TreeMask.behind [b, Q, Q] int16 for rows [b, Q] of families."""
        is_real = rows >= 0
        segment_of_row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        real = segment_of_row[rows]  # arbitrary for padding
        within = np.where(is_real, rows - self._starts[real], 0)
        parent = np.where(is_real, self.parents[real], -1)
        position = within + np.where(parent >= 0, self.lengths[parent], 0)
        alone = -2 - np.arange(rows.shape[1])  # each padding row is a segment of its own
        segment = np.where(is_real, real, alone)
        behind = position[:, :, None] - position[:, None, :]
        same = segment[:, :, None] == segment[:, None, :]
        visible = (same & (behind >= 0)) | (parent[:, :, None] == segment[:, None, :])
        return np.where(visible, behind, -1).astype(np.int16)

    @cached_property
    def _small_families(self) -> list[int]:
        sizes = self.lengths[: self.num_parents].copy()
        has_parent = self.parents >= 0
        np.add.at(sizes, self.parents[has_parent], self.lengths[has_parent])
        return np.flatnonzero(sizes <= _TREE_ROWS).tolist()

    def _children(self, parent: int) -> np.ndarray:
        return np.flatnonzero(self.parents == parent)

    def _rows(self, segment: int) -> np.ndarray:
        return np.arange(self._starts[segment], self._starts[segment] + self.lengths[segment])

    def rows_with_parent(self, segment: int) -> np.ndarray:
        """The rows that the last row of a segment attends to."""
        parent, own = self.parents[segment], self._rows(segment)
        return own if parent < 0 else np.concatenate([self._rows(parent), own])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


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
