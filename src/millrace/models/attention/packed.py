"""Causal attention over packed segments, as an attention function for transformers.

Promise: a row attends only to its segment and those that it continues, and scores of unrelated
segments are never computed: memory grows with the sum of squared lengths at worst, not with the
square of the sum. Window, softcap, sinks, scaling and grouped-query heads are supported. Dropout is
not, because the trainer must reproduce the distribution that was sampled.

On CUDA in bfloat16 or float16 a flash kernel takes the packed segments. Everywhere else, and for
features that the kernel lacks, segments of similar length are padded at the end and computed
together. The padding needs no mask: it comes after every real row, so causality hides it.

T = rows, b, Q, K = rectangles, queries and keys of a block, M = padded rows of all blocks,
H = heads, D = head size.
"""

import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.microbatch import Segments, common_prefix
from millrace.models.attention.context import ContextGroup
from millrace.models.attention.flash import flash_attention, packed_obstacle
from millrace.models.attention.layout import Block, PackedLayout, ScoreRules
from millrace.models.exact.attention import Tiles, attend_packed
from millrace.models.exact.mode import ExactMode
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits
from millrace.models.support import AttentionPath, ScoredTokens, register_attention

PACKED_ATTENTION = "millrace_packed"
_QUERY_BLOCK = 512  # queries whose scores are computed at one time


class _Gather(torch.autograd.Function):
    """Rows by index: [T, ...] -> [M, ...] with is_padding = None, or back. The gradient is a gather
    by the inverse index, where autograd's would be a slow scatter-add. That of padding is dropped,
    because no real row depends on it; the padding of a gradient is 0."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, is_padding: Tensor | None
    ) -> Tensor:
        ctx.inverse, ctx.is_padding = inverse, is_padding
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].index_select(0, ctx.inverse)
        if ctx.is_padding is not None:
            grad.masked_fill_(ctx.is_padding.view(-1, 1, 1), 0.0)
        return grad, None, None, None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    context: ContextGroup | None = None,  # None = one rank has all rows
    tiles: Tiles | None = None,  # of exact mode
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]; sinks: one more score per head, whose value is 0
    attention_chunk: int | None = None,
    query_scales: Tensor | None = None,  # [1, T]
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns [1, T, H, D_v]. With context parallelism, T are the
    rows of this rank, and the layout is that of all rows."""
    query = scaled(query, query_scales)
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]  # each [T, H, D]
    if sliding_window is not None and sliding_window >= layout.longest:
        sliding_window = None
    if attention_chunk is not None and attention_chunk >= layout.longest:
        attention_chunk = None
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        packed = [x.to(torch.get_autocast_dtype("cuda")) for x in packed]
    if context is not None:
        packed = context.to_heads(*packed, num_rows=layout.num_rows)
        s_aux = None if s_aux is None else context.own_heads(s_aux)
    q, k, v = packed
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    rules = ScoreRules(scale, sliding_window, softcap, s_aux, attention_chunk)
    if tiles is not None:
        return attend_packed(q, k, v, tiles, rules, layout=layout)[None], None
    attend_rows: Any = _attend_rows if attention_chunk is None else _attend_in_chunks
    out = attend_rows(q, k, v, layout, rules)
    if context is not None:
        out = context.to_rows(out)
    return out[None], None


def scaled(query: Tensor, scales: Tensor | None) -> Tensor:
    """Queries [1, H, T, D] times `scales` [1, T]."""
    return query if scales is None else (query * scales[:, None, :, None]).to(query.dtype)


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rules: ScoreRules
) -> Tensor:
    """[T, H, D] of each -> [T, H, D_v]."""
    obstacle = "the tensors are not on a GPU"
    if q.is_cuda:
        obstacle = packed_obstacle(q, k, v, layout, rules)
    if obstacle is None:
        flat = [*layout.calls]
        return flash_attention(q, k, v, flat, rules.window, rules.scale, rules.sinks)[0]
    options = (layout, rules, obstacle)
    return _attend_in_blocks(q, k, v, *options)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # the first layer makes the layout of the chunks
def _attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rules: ScoreRules
) -> Tensor:
    """[T, H, D] of each -> [T, H, D_v]."""
    assert rules.chunk is not None
    rows = layout.chunked(rules.chunk)
    q, k, v = (_Gather.apply(x, rows.order, rows.inverse, None) for x in (q, k, v))
    out = _attend_rows(q, k, v, rows.layout, rules._replace(chunk=None))
    return _Gather.apply(out, rows.inverse, rows.order, None)


@functools.cache
def _warn(obstacle: str) -> None:
    """Warn once per reason, not once per layer."""
    warnings.warn(
        f"The trainer's attention does not use the flash kernel because {obstacle}; it pads"
        " sequences by up to a third and takes several times as long.",
        stacklevel=3,
    )


@torch.compiler.disable  # its control flow depends on the layout
def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rules: ScoreRules, obstacle: str
) -> Tensor:
    """[T, H, D] of each -> [T, H, D_v]; `obstacle` is why the flash kernel is not used."""
    if q.is_cuda:
        _warn(obstacle)
    blocks = layout.blocks
    indices = (blocks.row_of_query, blocks.query_of_row)
    queries = _Gather.apply(q, *indices, None)
    if blocks.row_of_key is None:
        keys, values = (_Gather.apply(x, *indices, None) for x in (k, v))
    else:
        # Rows of shared prefixes are repeated; their gradients are summed.
        keys, values = (x.index_select(0, blocks.row_of_key) for x in (k, v))
    num_queries = [b * q for b, q, _ in (block.shape for block in blocks.blocks)]
    num_keys = [b * k for b, _, k in (block.shape for block in blocks.blocks)]
    parts = (queries.split(num_queries), keys.split(num_keys), values.split(num_keys))
    outputs = []
    for block, *inputs in zip(blocks.blocks, *parts, strict=True):
        own = (x.unflatten(0, (block.shape[0], -1)).transpose(1, 2) for x in inputs)
        out = attend(*own, block=block, rules=rules)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [b * Q, H, D_v]
    return _Gather.apply(torch.cat(outputs), *indices[::-1], blocks.is_padding)


def attend(
    q: Tensor,  # [b, H, Q, D]
    k: Tensor,  # [b, H_kv, K, D]
    v: Tensor,  # [b, H_kv, K, D_v]
    *,
    block: Block,
    rules: ScoreRules,
) -> Tensor:
    """Attention within each rectangle of one block; [b, H, Q, D_v]."""
    _, num_queries, num_keys = block.shape
    window = None if rules.window is None or rules.window >= num_keys else rules.window
    if block.behind is not None:
        return attend_masked(q, k, v, visible=_visible(block.behind, window), rules=rules)
    if window is None and rules.is_plain and num_queries == num_keys:
        return _sdpa(q, k, v, is_causal=True, scale=rules.scale)
    parts = []
    before = num_keys - num_queries  # keys that precede the first query
    for begin in range(0, num_queries, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, num_queries)
        first = 0 if window is None else max(0, before + begin - window + 1)
        at = torch.arange(before + begin, before + end, device=q.device)[:, None]
        behind = at - torch.arange(first, before + end, device=q.device)  # [queries, keys]
        keys = slice(first, before + end)
        part = (q[:, :, begin:end], k[:, :, keys], v[:, :, keys])
        parts.append(attend_masked(*part, visible=_visible(behind, window), rules=rules))
    return torch.cat(parts, dim=2)


def _visible(behind: Tensor, window: int | None) -> Tensor:
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor, rules: ScoreRules) -> Tensor:
    """Attention where `visible` (broadcast over heads) is True, whatever the window is."""
    if rules.is_plain:
        return _sdpa(q, k, v, attn_mask=visible, scale=rules.scale)
    grouped = q.unflatten(1, (k.shape[1], -1))  # heads that share keys side by side
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)) * rules.scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill(~visible.unsqueeze(-3), -torch.inf).float()
    if rules.sinks is not None:
        column = rules.sinks.float().view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return torch.matmul(weights, v[:, :, None]).flatten(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped, **options)


register_attention(PACKED_ATTENTION, packed_attention)


def _score(
    model: PreTrainedModel, sequences: Sequence[np.ndarray], *, exact: bool = False
) -> list[ScoredTokens]:
    """All sequences in one pass; the first two share a prompt."""
    shared = common_prefix(*sequences[:2])
    segments = Segments()
    prompt = segments.add(sequences[0][:shared])
    added = [segments.add(tokens[shared:], parent=prompt) for tokens in sequences[:2]]
    added += [segments.add(tokens) for tokens in sequences[2:]]
    rows = [segments.paths[number] for number in added]
    lengths = [len(tokens) for tokens in segments.tokens]
    layout = PackedLayout(lengths, parents=segments.parents, device=model.device)
    with ExactMode(torch.float32) if exact else nullcontext():
        hidden = hidden_states(
            model,
            input_ids=torch.from_numpy(np.concatenate(segments.tokens))[None],
            position_ids=torch.from_numpy(np.concatenate(segments.positions))[None],
            layout=layout,
            tiles=Tiles.packed(layout, model.device) if exact else None,
        )
        logprobs = final_logits(model, hidden).log_softmax(-1).numpy()
    pairs = zip(rows, sequences, strict=True)
    return [ScoredTokens(tokens=t, logprobs=logprobs[own[:-1], t[1:]]) for own, t in pairs]


EXACT_PACKED = AttentionPath(
    name=PACKED_ATTENTION, user="trainer", score=functools.partial(_score, exact=True)
)
PACKED = AttentionPath(name=PACKED_ATTENTION, user="trainer", score=_score)
