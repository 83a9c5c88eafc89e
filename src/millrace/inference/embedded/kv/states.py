"""Recurrent states: what layers without KV remember of a sequence, one state per batch slot.

A state lies in the layers of a transformers cache. A pool holds the tensors of all slots. A call of
a mixer gets a cache with the states of its sequences; what it leaves there goes back to the pool.

Promise: a state is that of the tokens of its slot's sequence that are cached. It cannot go back to
an earlier token, so sequences begin with a fork, a snapshot (snapshots.py) or their first token.

The engine's thread calls everything. T = tokens of a pass, b = sequences of a group, n = tokens of
each, D = hidden size.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from millrace.inference.embedded.kv.cache import KVShape
from millrace.inference.embedded.kv.snapshots import SnapshotWrite
from millrace.models.attention.layout import ScoreRules
from millrace.models.attention.recurrent import run_mixer

Place = tuple[str, Any]  # attribute of a cache's layer, and key if that is a dictionary


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
        self.has_sinks = False
        self.layers: dict[int, Any] = {}  # of the cache, with the state of one sequence

    @cached_property
    def unused(self) -> Cache:
        return DynamicCache(config=self._config)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> Tensor:
        self.has_sinks |= rules.sinks is not None
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
            cache = self._load(number, None if group.begins else group.slots)
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

    def _load(self, number: int, slots: Tensor | None) -> Cache:
        """A cache with the states of these slots in layer `number`; None = without any."""
        if slots is None:
            return _cache_with(self._probe.unused, number)
        tensors = {place: pool[slots] for place, pool in self._pools[number].items()}
        return _cache_with(self._probe.unused, number, self._probe.layers[number], tensors)


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


def _shallow(layer: Any, tensors: Mapping[Place, Tensor]) -> Any:
    """A copy of a cache's layer with these tensors."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            vars(copied)[name] = {key: tensors.get((name, key), x) for key, x in value.items()}
        elif (name, None) in tensors:
            vars(copied)[name] = tensors[name, None]
    return copied


def _cache_with(
    cache: Cache, number: int, layer: Any = None, tensors: Mapping[Place, Tensor] | None = None
) -> Cache:
    """A copy of a cache, with a copy of this layer, or of its own, that has these tensors."""
    copied = copy.copy(cache)
    own = _shallow(cache.layers[number] if layer is None else layer, tensors or {})
    copied.layers = [*cache.layers[:number], own, *cache.layers[number + 1 :]]
    return copied
