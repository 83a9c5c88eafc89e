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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class States:
    """Keys and values of all tokens that were read of one sequence."""

    layers: tuple[tuple[Tensor, Tensor], ...]  # [H, length, E] each
    length: int


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
    known = [states.length if states else 0 for states in before]
    new = [len(tokens) - past for tokens, past in zip(sequences, known, strict=True)]
    most_known, most_new = max(known), max(new)
    ids = np.zeros((len(sequences), most_new), np.int64)
    positions = np.zeros_like(ids)
    seen = np.zeros((len(sequences), most_known + most_new), np.int64)
    for row, (tokens, past, count) in enumerate(zip(sequences, known, new, strict=True)):
        ids[row, :count] = tokens[past:]
        positions[row, :count] = np.arange(past, past + count)
        seen[row, most_known - past : most_known + count] = 1
    cache = _joined(before, most_known) if any(keeps) or most_known else None
    output = backbone(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        attention_mask=torch.from_numpy(seen).to(device),
        past_key_values=cache,
        use_cache=cache is not None,
    )
    kept: list[States | None] = [None] * len(sequences)
    for row, (past, count) in enumerate(zip(known, new, strict=True)):
        if keeps[row] and cache is not None:
            kept[row] = _cut(cache, row, slice(most_known - past, most_known + count))
    return output.last_hidden_state, kept


def _joined(before: Sequence[States | None], most_known: int) -> DynamicCache:
    """The states of all sequences as one cache; those of shorter ones begin later."""
    cache = DynamicCache()
    first = next((states for states in before if states), None)
    if first is None:
        return cache
    for number, (keys, values) in enumerate(first.layers):
        joined = []
        for side, example in enumerate((keys, values)):
            heads, _, size = example.shape
            whole = example.new_zeros(len(before), heads, most_known, size)
            for row, states in enumerate(before):
                if states:
                    whole[row, :, most_known - states.length :] = states.layers[number][side]
            joined.append(whole)
        cache.update(*joined, number)
    return cache


def _cut(cache: DynamicCache, row: int, columns: slice) -> States:
    layers: list[Any] = cache.layers
    # Cloned, or a view would hold the padded batch in memory.
    cut = tuple(
        (layer.keys[row, :, columns].clone(), layer.values[row, :, columns].clone())
        for layer in layers
    )
    return States(layers=cut, length=columns.stop - columns.start)


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).data, digest_size=16).digest()
