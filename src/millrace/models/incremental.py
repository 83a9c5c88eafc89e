"""Incremental forward passes over sequences that grow: keys and values are kept, not recomputed.

Promise: hidden states are those of one pass over each whole sequence by itself. The new tokens of
all sequences are laid end to end, without padding. Cached keys and values are never copied for a
pass: each sequence has a buffer of its own, to which new ones are appended.

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

from millrace.models.attention.layout import Block
from millrace.models.attention.packed import attend
from millrace.models.support import register_attention

INCREMENTAL_ATTENTION = "millrace_incremental"
_FIRST_CAPACITY = 64  # tokens of a new buffer; it doubles when it is full


class SequenceKv:
    """Keys and values of the tokens of one sequence, by layer. Used by one pass at a time."""

    def __init__(self) -> None:
        self.length = 0  # tokens that all layers have processed
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; [H, capacity, E] each

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a layer's new tokens, [H, new, E]; returns all of them."""
        end = self.length + key.shape[1]
        buffers = self._buffers.get(layer)
        if buffers is None or end > buffers[0].shape[1]:
            capacity = max(_FIRST_CAPACITY, 2 * end)
            larger = tuple(x.new_empty(x.shape[0], capacity, x.shape[2]) for x in (key, value))
            for new, old in zip(larger, buffers or (), strict=False):
                new[:, : self.length] = old[:, : self.length]
            buffers = self._buffers[layer] = (larger[0], larger[1])
        keys, values = buffers
        keys[:, self.length : end], values[:, self.length : end] = key, value
        return keys[:, :end], values[:, :end]


class SequenceKvCache:
    """An LRU cache of SequenceKv by their tokens, of at most max_tokens. Used by one thread."""

    def __init__(self, *, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._entries: OrderedDict[bytes, SequenceKv] = OrderedDict()

    def put(self, tokens: np.ndarray, kv: SequenceKv) -> None:
        self.take(tokens)
        self._entries[_key(tokens)] = kv
        self.num_tokens += kv.length
        while self.num_tokens > self._max_tokens:
            _, dropped = self._entries.popitem(last=False)
            self.num_tokens -= dropped.length

    def take(self, tokens: np.ndarray) -> SequenceKv | None:
        """Remove and return the entry of exactly these tokens."""
        kv = self._entries.pop(_key(tokens), None)
        self.num_tokens -= kv.length if kv else 0
        return kv


def forward_incremental(
    backbone: nn.Module,
    sequences: Sequence[np.ndarray],
    past: Sequence[SequenceKv | None],
    *,
    keep: Sequence[bool],
) -> tuple[list[Tensor], list[SequenceKv | None]]:
    """Hidden states [new, D] of the new tokens of each sequence, and the keys and values of those
    that are kept, `past` included. The backbone's attention is INCREMENTAL_ATTENTION."""
    device = next(backbone.parameters()).device
    caches = [kv or (SequenceKv() if kept else None) for kv, kept in zip(past, keep, strict=True)]
    known = [kv.length if kv else 0 for kv in caches]
    new = [tokens[length:] for tokens, length in zip(sequences, known, strict=True)]
    counts = [len(tokens) for tokens in new]
    positions = np.concatenate(
        [np.arange(length, length + count) for length, count in zip(known, counts, strict=True)]
    )
    output = backbone(
        input_ids=torch.from_numpy(np.concatenate(new).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        use_cache=False,
        incremental=list(zip(caches, counts, strict=True)),
    )
    for kv, count in zip(caches, counts, strict=True):
        if kv is not None:
            kv.length += count
    kept_caches = [kv if kept else None for kv, kept in zip(caches, keep, strict=True)]
    return list(output.last_hidden_state[0].split(counts)), kept_caches


def incremental_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, H_kv, T, E]
    value: Tensor,  # [1, H_kv, T, E_v]
    attention_mask: Tensor | None,
    *,
    incremental: Sequence[tuple[SequenceKv | None, int]],  # cache and new tokens per sequence
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns [1, T, H, E_v]."""
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ends = itertools.accumulate(count for _, count in incremental)
    parts = []
    for (kv, count), end in zip(incremental, ends, strict=True):
        q, k, v = (x[0, :, end - count : end] for x in (query, key, value))
        if kv is not None:
            k, v = kv.append(layer, k, v)
        block = Block(shape=(1, count, k.shape[1]))
        options = {"block": block, "scale": scale, "window": sliding_window, "softcap": softcap}
        parts.append(attend(q[None], k[None], v[None], **options)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).data, digest_size=16).digest()


register_attention(INCREMENTAL_ATTENTION, incremental_attention)
