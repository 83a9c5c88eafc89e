"""Causal attention over sequences laid end to end, as an attention function for transformers.

Promise: no token attends outside its sequence, and no matrix holds scores of two sequences: memory
grows with the sum of squared lengths at worst, never with the square of the sum. Window, softcap,
scaling and grouped heads are honoured; dropout is not, because the trainer must reproduce the
distribution that was sampled.

Sequences of similar length are attended to together, padded at the end. The padding needs no mask:
it comes after every real token, where causality hides it.

T = tokens, b = sequences of a bucket, L = longest of them, M = sum of b * L over the buckets,
H = heads, D = head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_ATTENTION = "millrace_packed"
_MIN_FILL = 0.75  # a sequence shorter than this share of its bucket's longest opens a new bucket
_QUERY_BLOCK = 512  # queries whose scores exist together, where scores must be spelled out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLayout:
    """Where each token of a microbatch sits in padded buckets; made once, used by every layer."""

    buckets: tuple[tuple[int, int], ...]  # (b, L) of each
    padded_from_packed: Tensor  # [M] int64; padding points at token 0
    packed_from_padded: Tensor  # [T] int64
    is_padding: Tensor  # [M] bool

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, *, device: torch.device) -> "PackedLayout":
        """`lengths` of the sequences, in the order in which they lie."""
        lengths = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        buckets: list[tuple[int, int]] = []
        sources, paddings = [], []
        for members in _bucketed(lengths):
            longest = int(lengths[members].max())
            offsets = np.arange(longest)
            padding = offsets >= lengths[members][:, None]  # [b, L]
            sources.append(np.where(padding, 0, starts[members][:, None] + offsets).ravel())
            paddings.append(padding.ravel())
            buckets.append((len(members), longest))
        source, is_padding = np.concatenate(sources), np.concatenate(paddings)
        inverse = np.empty(int(lengths.sum()), np.int64)
        inverse[source[~is_padding]] = np.flatnonzero(~is_padding)
        return cls(
            buckets=tuple(buckets),
            padded_from_packed=torch.from_numpy(source).to(device),
            packed_from_padded=torch.from_numpy(inverse).to(device),
            is_padding=torch.from_numpy(is_padding).to(device),
        )


def _bucketed(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of sequences that are padded together, longest first."""
    order = np.argsort(-lengths, kind="stable")
    buckets: list[np.ndarray] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] < _MIN_FILL * lengths[order[begin]]:
            buckets.append(order[begin:end])
            begin = end
    return buckets


class _Pad(torch.autograd.Function):
    """[T, ...] -> [M, ...]. The gradient of padding is dropped: nothing real depends on it."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.padded_from_packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.packed_from_padded), None


class _Unpad(torch.autograd.Function):
    """[M, ...] -> [T, ...]. Autograd's own backward of a gather would be a slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return padded.index_select(0, layout.packed_from_padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        padded = grads[0].index_select(0, ctx.layout.padded_from_packed)
        return padded.masked_fill_(ctx.layout.is_padding.view(-1, 1, 1), 0.0), None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns [1, T, H, D_v]."""
    sizes = [b * longest for b, longest in layout.buckets]
    padded = [
        _Pad.apply(x[0].transpose(0, 1), layout).split(sizes)  # of each bucket: [b * L, H, D]
        for x in (query, key, value)
    ]
    outputs = []
    for shape, *inputs in zip(layout.buckets, *padded, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in inputs)
        out = _attend(q, k, v, scaling=scaling, window=sliding_window, softcap=softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [b * L, H, D_v]
    return _Unpad.apply(torch.cat(outputs), layout)[None], None


def _attend(
    q: Tensor,  # [b, H, L, D]
    k: Tensor,  # [b, H_kv, L, D]
    v: Tensor,  # [b, H_kv, L, D_v]
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention within each row; [b, H, L, D_v]."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if window is not None and window >= length:
        window = None
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        first = 0 if window is None else max(0, begin - window + 1)
        at = torch.arange(begin, end, device=q.device)[:, None]
        behind = at - torch.arange(first, end, device=q.device)  # [queries, keys]
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        block = (q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end])
        if softcap is None:
            out = F.scaled_dot_product_attention(
                *block, attn_mask=seen, scale=scaling, enable_gqa=grouped
            )
        else:
            out = _attend_capped(*block, seen=seen, scaling=scaling, softcap=softcap)
        blocks.append(out)
    return torch.cat(blocks, dim=2)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores pass through softcap * tanh(scores / softcap)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * (scaling or q.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The layout says who attends to whom."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
