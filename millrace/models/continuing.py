"""Forward passes over sequences that grow: what a causal model has read is kept, not read again.

Promise: hidden states are those of one pass over each whole sequence by itself.

B = sequences of a batch, N = longest of what is new, P = longest of what has been read,
H = heads, E = head size, D = hidden size.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

MAX_CHUNKS = (
    8  # of one sequence, before they are joined to one: each costs a copy when it is read on
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class States:
    """Keys and values of all tokens that were read of one sequence."""

    chunks: tuple[Tensor, ...]  # [layers, 2, H, tokens of the chunk, E] each, in order
    length: int

    def grown(self, chunk: Tensor) -> "States":
        chunks = (*self.chunks, chunk)
        if len(chunks) > MAX_CHUNKS:
            chunks = (torch.cat(chunks, dim=3),)
        return States(chunks=chunks, length=self.length + chunk.shape[3])


NOTHING = States(chunks=(), length=0)


class Shelf:
    """Keeps the states of so many tokens; what was put there longest ago goes first. Used by one
    thread."""

    def __init__(self, *, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._states: OrderedDict[bytes, States] = OrderedDict()

    def put(self, tokens: np.ndarray, states: States) -> None:
        self.take(tokens)
        self._states[_key(tokens)] = states
        self.num_tokens += states.length
        while self.num_tokens > self._max_tokens:
            _, dropped = self._states.popitem(last=False)
            self.num_tokens -= dropped.length

    def take(self, tokens: np.ndarray) -> States | None:
        """The states of exactly these tokens, which are no longer kept here."""
        states = self._states.pop(_key(tokens), None)
        self.num_tokens -= states.length if states else 0
        return states


def run_on(
    backbone: nn.Module,
    sequences: Sequence[np.ndarray],
    before: Sequence[States | None],
    *,
    keeps: Sequence[bool],
) -> tuple[Tensor, list[States | None]]:
    """Hidden states [B, N, D] of what is new in each sequence, and the states that are to be kept.

    The past stands on the left up to P, the new tokens behind it; both are padded on the outside.
    """
    device = next(backbone.parameters()).device
    past = [states or NOTHING for states in before]
    known = [states.length for states in past]
    new = [len(tokens) - length for tokens, length in zip(sequences, known, strict=True)]
    most_known, most_new = max(known), max(new)
    ids = np.zeros((len(sequences), most_new), np.int64)
    positions = np.zeros_like(ids)
    seen = np.zeros((len(sequences), most_known + most_new), np.int64)
    for row, (tokens, length, count) in enumerate(zip(sequences, known, new, strict=True)):
        ids[row, :count] = tokens[length:]
        positions[row, :count] = np.arange(length, length + count)
        seen[row, most_known - length : most_known + count] = 1
    cache = _joined(past, most_known=most_known, most_new=most_new)
    output = backbone(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=torch.from_numpy(seen).to(device),
        past_key_values=cache if any(keeps) or most_known else None,
        use_cache=any(keeps) or most_known > 0,
    )
    kept: list[States | None] = [None] * len(sequences)
    for row, count in enumerate(new):
        if keeps[row]:
            chunk = _cut(cache, row, slice(most_known, most_known + count))
            kept[row] = past[row].grown(chunk)
    return output.last_hidden_state, kept


class _RoomyLayer(DynamicLayer):
    """Keys and values of a layer with room behind them: what is new is written there, where
    appending would copy all that was before."""

    def __init__(self, keys: Tensor, values: Tensor, *, length: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values  # [B, H, P + N, E]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        new = slice(self._length, self._length + key_states.shape[-2])
        self.keys[:, :, new], self.values[:, :, new] = key_states, value_states
        self._length = new.stop
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> int:
        return self._length


def _joined(past: Sequence[States], *, most_known: int, most_new: int) -> DynamicCache:
    """The states of all sequences as one cache; those of shorter ones begin later."""
    cache = DynamicCache()
    example = next((states.chunks[0] for states in past if states.chunks), None)
    if example is None:
        return cache
    num_layers, _, heads, _, size = example.shape
    columns = most_known + most_new
    room = example.new_empty(num_layers, 2, len(past), heads, columns, size)
    for row, states in enumerate(past):
        at = most_known - states.length
        room[:, :, row, :, :at] = 0  # never seen, but what is not finite would be heard of
        for chunk in states.chunks:
            room[:, :, row, :, at : at + chunk.shape[3]] = chunk
            at += chunk.shape[3]
    cache.layers += [_RoomyLayer(keys, values, length=most_known) for keys, values in room]
    return cache


def _cut(cache: DynamicCache, row: int, columns: slice) -> Tensor:
    """Copied, or a view would hold the padded batch in memory."""
    layers: list[Any] = cache.layers
    cut = [(layer.keys[row, :, columns], layer.values[row, :, columns]) for layer in layers]
    return torch.stack([torch.stack(sides) for sides in cut])


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).data, digest_size=16).digest()
