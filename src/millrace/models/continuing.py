"""Forward passes over sequences that grow: what a causal model has read is kept, not read again.

Promise: hidden states are those of one pass over each whole sequence by itself. New tokens of all
sequences are laid end to end, without padding, and the states of one are never copied for a pass:
each sequence has room of its own, where what is new is written behind what was there.

T = new tokens of all sequences, H = heads, E = head size, D = hidden size.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from millrace.models.attention.layout import Block
from millrace.models.attention.packed import attend

GROWING_ATTENTION = "millrace_growing"
_ROOM = 64  # tokens, of a sequence that is kept for the first time; it doubles as it fills


class States:
    """Keys and values of all tokens that were read of one sequence. Used by one pass at a time."""

    def __init__(self) -> None:
        self.length = 0  # tokens whose states are complete in all layers
        self._rooms: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; [H, room, E] each

    def grow(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a layer's new tokens, [H, new, E], are written behind its others; all of
        them."""
        end = self.length + key.shape[1]
        rooms = self._rooms.get(layer)
        if rooms is None or end > rooms[0].shape[1]:
            size = max(_ROOM, 2 * end)
            roomier = tuple(x.new_empty(x.shape[0], size, x.shape[2]) for x in (key, value))
            for new, old in zip(roomier, rooms or (), strict=False):
                new[:, : self.length] = old[:, : self.length]
            rooms = self._rooms[layer] = (roomier[0], roomier[1])
        keys, values = rooms
        keys[:, self.length : end], values[:, self.length : end] = key, value
        return keys[:, :end], values[:, :end]


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
) -> tuple[list[Tensor], list[States | None]]:
    """Hidden states [new, D] of what is new in each sequence, and the states that are to be kept:
    those of before, grown. The backbone's attention is GROWING_ATTENTION."""
    device = next(backbone.parameters()).device
    past = [
        states or (States() if keep else None) for states, keep in zip(before, keeps, strict=True)
    ]
    known = [states.length if states else 0 for states in past]
    new = [tokens[length:] for tokens, length in zip(sequences, known, strict=True)]
    counts = [len(tokens) for tokens in new]
    positions = np.concatenate(
        [np.arange(length, length + count) for length, count in zip(known, counts, strict=True)]
    )
    output = backbone(
        input_ids=torch.from_numpy(np.concatenate(new).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        use_cache=False,
        growing=list(zip(past, counts, strict=True)),
    )
    for states, count in zip(past, counts, strict=True):
        if states is not None:
            states.length += count
    kept = [states if keep else None for states, keep in zip(past, keeps, strict=True)]
    return list(output.last_hidden_state[0].split(counts)), kept


def growing_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, H_kv, T, E]
    value: Tensor,  # [1, H_kv, T, E_v]
    attention_mask: Tensor | None,
    *,
    growing: Sequence[tuple[States | None, int]],  # of each sequence, and its new tokens
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns [1, T, H, E_v]."""
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ends = itertools.accumulate(count for _, count in growing)
    parts = []
    for (states, count), end in zip(growing, ends, strict=True):
        q, k, v = (x[0, :, end - count : end] for x in (query, key, value))
        if states is not None:
            k, v = states.grow(layer, k, v)
        block = Block(shape=(1, count, k.shape[1]))
        options = {"block": block, "scale": scale, "window": sliding_window, "softcap": softcap}
        parts.append(attend(q[None], k[None], v[None], **options)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).data, digest_size=16).digest()


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """What grows says who attends to whom."""


AttentionInterface.register(GROWING_ATTENTION, growing_attention)
AttentionMaskInterface.register(GROWING_ATTENTION, _no_mask)
