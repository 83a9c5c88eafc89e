"""Recurrent states: what layers without KV remember of a sequence, one state per batch slot.

A state lies in the layers of a transformers cache. A pool holds the tensors of all slots. A call of
a mixer gets a cache with the states of its sequences; what it leaves there goes back to the pool.

Snapshots make cached prefixes usable, as a state cannot go back to an earlier token. A pass copies
states where KV blocks end: at the last block of what is prefilled, where a sequence branches off
from an earlier one, and wherever a pass ends with a block. The last kind replaces the earlier one
of its slot.

Promise: a state is that of the tokens of its slot's sequence that are cached; sequences begin with
a fork, a snapshot or their first token. A snapshot is the state after the last token of its block,
computed by the weights that computed the KV up to there, and valid as long as the contents of the
block are. The number of snapshots is fixed; invalid ones are overwritten first, then the least
recently used.

The engine's thread calls everything. T = tokens of a pass, b = sequences of a group, n = tokens of
each, D = hidden size, R = slots of a pass, B = blocks.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.cache import KVShape
from millrace.models.attention.layout import ScoreRules
from millrace.models.attention.recurrent import run_mixer

_NONE = -1
Place = tuple[str, Any]  # attribute of a cache's layer, and key if that is a dictionary


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


class SequenceGroup(NamedTuple):
    """Sequences of a pass that have equally many tokens, and all begin or all continue."""

    slots: Tensor  # [b] int64
    tokens: Tensor  # [b, n] int64; their tokens in the flat batch
    begins: bool
    kept: Tensor  # [k] int64; those whose states are copied to rows `targets` of the pool
    targets: Tensor  # [k] int64


class CacheProbe:
    """Takes the place of a PagedBatch before there is a cache, to learn what each layer stores."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config.get_text_config()
        self.shapes: dict[int, KVShape] = {}
        self.rules: dict[int, ScoreRules] = {}
        self.layers: dict[int, Any] = {}  # of the cache, with the state of one sequence

    @cached_property
    def unused(self) -> Cache:
        return DynamicCache(config=self._config)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> Tensor:
        self.rules[layer] = rules
        sizes = {"num_heads": k.shape[1], "key_dim": k.shape[2], "value_dim": v.shape[2]}
        self.shapes[layer] = KVShape(**sizes, is_capped=rules.softcap is not None)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def mix(self, mixer: Any, hidden: Tensor) -> Tensor:
        cache = _cache_with(self.unused, mixer.layer_idx)
        output = run_mixer(mixer, hidden[None], cache)[0]
        self.layers[mixer.layer_idx] = cache.layers[mixer.layer_idx]
        return output

    @property
    def slot_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        tensors = (tensor for layer in self.layers.values() for _, tensor in _tensors(layer))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StatePool:
    def __init__(self, probe: CacheProbe, *, num_rows: int) -> None:
        """Rows are slots, and snapshots after them."""
        self._probe = probe
        self._pools: dict[int, dict[Place, Tensor]] = {
            number: {at: x.new_zeros(num_rows, *x.shape[1:]) for at, x in _tensors(layer)}
            for number, layer in probe.layers.items()
        }

    def mix(self, mixer: Any, hidden: Tensor, groups: tuple[SequenceGroup, ...]) -> Tensor:
        """The output [T, D] of a mixer; the states of the groups' slots advance."""
        number, output = mixer.layer_idx, torch.empty_like(hidden)
        for group in groups:
            cache = _cache_with(self._probe.unused, number)
            if not group.begins:
                states = {place: pool[group.slots] for place, pool in self._pools[number].items()}
                cache = _cache_with(cache, number, self._probe.layers[number], states)
            # In transformers, layers of Mamba, unlike Mamba2, continue a state by one token only.
            is_single = not group.begins and hasattr(mixer, "x_proj")
            for tokens in group.tokens.split(1 if is_single else group.tokens.shape[1], dim=1):
                output[tokens] = run_mixer(mixer, hidden[tokens], cache).to(output.dtype)
            for place, tensor in _tensors(cache.layers[number]):
                pool = self._pools[number][place]
                pool.index_copy_(0, group.slots, tensor)
                if len(group.kept):
                    pool.index_copy_(0, group.targets, tensor[group.kept])
        return output

    def copy(self, source: int, targets: list[int]) -> None:
        """Give slots the state of a row."""
        for tensor in (t for pool in self._pools.values() for t in pool.values()):
            tensor[targets] = tensor[source].clone()


def groups_of(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    *,
    snapshots: tuple[SnapshotWrite, ...] = (),
    device: torch.device,
) -> tuple[SequenceGroup, ...]:
    """The groups of a pass in which each slot computes `counts` tokens after `starts` cached ones,
    slot after slot. All arrays are [R]. A sequence is cut where its state is copied, and the groups
    with its parts come in order."""
    offsets = np.cumsum(counts) - counts - starts  # of each row's token 0 in the flat batch
    ends: list[list[tuple[int, int]]] = [[] for _ in slots]
    for row, at, target in snapshots:
        ends[row].append((at, target))
    groups: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = {}
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        begin = start
        for part, (end, target) in enumerate([*sorted(ends[row]), (start + count, -1)]):
            if end > begin:
                groups.setdefault((part, end - begin, begin == 0), []).append((row, begin, target))
            begin = end
    found: list[SequenceGroup] = []
    for (_, count, begins), parts in sorted(groups.items()):
        rows, firsts, targets = np.array(parts).T
        tokens = (offsets[rows] + firsts)[:, None] + np.arange(count)
        kept = np.flatnonzero(targets >= 0)
        arrays = (slots[rows], tokens, kept, targets[kept])
        own, at, *copied = (torch.from_numpy(x).to(device) for x in arrays)
        found.append(SequenceGroup(own, at, begins, *copied))
    return tuple(found)


def _tensors(layer: Any) -> Iterator[tuple[Place, Tensor]]:
    """The tensors of a cache's layer, in whichever attributes transformers has them."""
    for name, value in vars(layer).items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        yield from (((name, key), x) for key, x in inner if isinstance(x, Tensor))


def _cache_with(
    cache: Cache, number: int, layer: Any = None, tensors: Mapping[Place, Tensor] | None = None
) -> Cache:
    """A copy of a cache, with a copy of this layer, or of its own, that has these tensors."""
    layer, tensors = cache.layers[number] if layer is None else layer, tensors or {}
    own, copied = copy.copy(layer), copy.copy(cache)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            vars(own)[name] = {key: tensors.get((name, key), x) for key, x in value.items()}
        elif (name, None) in tensors:
            vars(own)[name] = tensors[name, None]
    copied.layers = [*cache.layers[:number], own, *cache.layers[number + 1 :]]
    return copied
