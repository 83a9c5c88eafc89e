"""Snapshots of recurrent states: they make cached prefixes usable by models that have such states.

A state cannot go back to an earlier token. So a pass copies states where KV blocks end: at the last
block of what is prefilled, where a sequence branches off from an earlier one, and wherever a pass
ends with a block. The last kind replaces the earlier one of its slot.

Promise: a snapshot is the state after the last token of its block, computed by the weights that
computed the KV up to there. It is valid as long as the contents of the block are. The number of
snapshots is fixed; invalid ones are overwritten first, then the least recently used.

Host side only (numpy): the states are rows of a StatePool. The engine's thread calls everything.
R = slots of a pass, B = blocks.
"""

import itertools
from typing import NamedTuple

import numpy as np

from millrace.inference.embedded.kv.blocks import BlockTables

_NONE = -1


class SnapshotWrite(NamedTuple):
    """A copy of a state that a pass makes on its way."""

    row: int  # of the plan
    num_tokens: int  # of the sequence that the state holds then
    target: int  # row of the StatePool


class StateSnapshots:
    def __init__(self, tables: BlockTables, *, first_row: int, num_rows: int) -> None:
        """`first_row`: of the snapshots in the StatePool, after the rows of the slots."""
        self._tables, self._first_row = tables, first_row
        self._blocks = np.full(num_rows, _NONE)  # at whose end each state is
        self._content_ids = np.zeros(num_rows, dtype=np.int64)  # of those blocks
        self._slots = np.full(num_rows, _NONE)  # whose newest block end it is
        self._used_at = np.zeros(num_rows, dtype=np.int64)
        self._branches = np.zeros(first_row, dtype=np.int64)  # by slot: tokens before the branch
        self._clock = itertools.count(1)

    def num_usable(self, blocks: np.ndarray) -> int:
        """How many of a sequence's first blocks [B] end with a snapshot at the latest."""
        at = np.flatnonzero(np.isin(blocks, self._blocks[self._is_valid()]))
        return int(at[-1]) + 1 if len(at) else 0

    def use(self, block: int) -> int:
        """The row of the StatePool with the state at the end of this block."""
        row = np.flatnonzero(self._is_valid() & (self._blocks == block))[0]
        self._used_at[row] = next(self._clock)
        return self._first_row + int(row)

    def begin(self, slot: int, *, branch: int) -> None:
        """A sequence got this slot; an earlier one had the same first `branch` tokens."""
        self._branches[slot] = branch
        self._slots[self._slots == slot] = _NONE

    def plan(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, *, num_tokens: np.ndarray
    ) -> tuple[SnapshotWrite, ...]:
        """What to copy while slots compute `counts` tokens after `starts` cached ones; they have
        num_tokens. All arrays are [R]. Overwritten snapshots are invalid at once."""
        size, ends = self._tables.block_tokens, starts + counts
        lasts = (num_tokens - 1) // size * size
        wanted: list[tuple[int, int, int]] = []  # row, num_tokens, slot whose newest it is
        for row in np.flatnonzero((lasts > starts) | (ends % size == 0)).tolist():
            slot, start, end = int(slots[row]), int(starts[row]), int(ends[row])
            owners = dict.fromkeys((int(self._branches[slot]), int(lasts[row])), _NONE)
            if end % size == 0:
                owners.setdefault(end, slot)
            wanted += [(row, at, owner) for at, owner in owners.items() if start < at <= end]
        newest = [owner for *_, owner in wanted if owner != _NONE]
        self._blocks[np.isin(self._slots, newest)] = _NONE
        age = np.where(self._is_valid(), self._used_at, 0)
        rows = np.argsort(age, kind="stable")[: len(wanted)]
        self._blocks[rows] = _NONE
        self._slots[rows] = [owner for *_, owner in wanted[: len(rows)]]
        pairs = zip(wanted, (self._first_row + rows).tolist(), strict=False)
        return tuple(SnapshotWrite(row, at, target) for (row, at, _), target in pairs)

    def complete(self, slots: np.ndarray, written: tuple[SnapshotWrite, ...]) -> None:
        """The pass with these slots [R] was computed."""
        for write in written:
            at = write.num_tokens // self._tables.block_tokens - 1
            row, block = write.target - self._first_row, self._tables.rows[slots[write.row], at]
            self._blocks[row] = block
            self._content_ids[row] = self._tables.pool.content_ids[block]
            self._used_at[row] = next(self._clock)

    def _is_valid(self) -> np.ndarray:
        current = self._tables.pool.content_ids[self._blocks]
        return (self._blocks != _NONE) & (current == self._content_ids)
