"""Attention over a paged KV cache, plugged into transformers through its AttentionInterface.

A forward pass is one flat batch of tokens, [1, T]. Each layer receives a PagedBatch as a keyword
argument, writes the new keys and values to their KV slots, and attends bucket by bucket. On a GPU,
decode steps and prefill use the operators of decode/attention.py instead.

Promise: a token attends to the tokens of its own sequence up to itself, and to nothing else.

T = tokens of the pass; S = sequences of a bucket, Q = its queries per sequence, L = its padded
context; H = query heads, G = query heads per KV head, D = head dimension.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.inference.embedded.decode.attention import DecodeLayer, PrefillLayer
from millrace.inference.embedded.kv.cache import KVCache, from_entries, to_entries
from millrace.inference.embedded.kv.states import CacheProbe, SequenceGroup, StatePool
from millrace.models.attention.layout import PackedLayout, ScoreRules
from millrace.models.attention.packed import attend_masked, packed_attention, scaled
from millrace.models.exact.attention import Tiles, attend, store
from millrace.models.loading import hidden_states

PAGED_ATTENTION = "millrace_paged"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Sequences that attend together, padded to the longest of them."""

    num_tokens: int  # of the flat batch, sequence after sequence
    blocks: Tensor  # [S * blocks per sequence] int64
    positions: Tensor  # [S, Q] int64; where padded, some position of the same sequence
    padded: Tensor | None = None  # [S, Q] int64; tokens of the bucket; None = all have Q queries
    unpadded: Tensor | None = None  # [num_tokens] int64; places of those tokens in [S * Q]
    fresh: bool = False  # one sequence from its first token on: no KV has to be gathered
    # By window, chunk and L.
    masks: dict[tuple[int | None, int | None, int], Tensor] = field(default_factory=dict)

    def mask(
        self, *, window: int | None, chunk: int | None, context: int, dtype: torch.dtype
    ) -> Tensor:
        """[S, 1, Q, L] additive; built once per pass and kind of layer."""
        mask = self.masks.get((window, chunk, context))
        if mask is None:
            at = torch.arange(context, device=self.positions.device)
            query_at = self.positions[:, None, :, None]
            hidden = at > query_at
            if window is not None:
                hidden |= at <= query_at - window
            if chunk is not None:
                hidden |= at < query_at // chunk * chunk
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
            self.masks[window, chunk, context] = mask
        return mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedBatch:
    """What attention needs to know about one forward pass."""

    cache: KVCache
    slot_mapping: Tensor  # [T] int64; where each token's key and value go
    buckets: tuple[Bucket, ...]  # cover 0..T in order
    states: StatePool | None = None  # of layers with a recurrent state
    groups: tuple[SequenceGroup, ...] = ()  # likewise

    def attend(
        self,
        layer: int,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, H // G, D]
        value: Tensor,  # [T, H // G, Dv]
        rules: ScoreRules,
    ) -> Tensor:  # [T, H, Dv]
        cached = self.cache.layers[layer]
        entries = to_entries(key, value, cached)
        cached.index_copy_(0, self.slot_mapping, entries)
        if cached.dtype == torch.uint8:
            dims = {"key_dim": key.shape[-1], "value_dim": value.shape[-1]}
            key, value = from_entries(entries, **dims, dtype=value.dtype)
        sizes, outputs = [bucket.num_tokens for bucket in self.buckets], []
        parts = (x.split(sizes) for x in (query, key, value))
        for bucket, q, k, v in zip(self.buckets, *parts, strict=True):
            if bucket.fresh:
                keys, values = (x.transpose(0, 1)[None] for x in (k, v))
            else:
                num_rows = len(bucket.positions)
                rows = {"blocks": bucket.blocks, "num_rows": num_rows}
                keys, values = self.cache.gather(layer, **rows, dtype=q.dtype)
            outputs.append(_attend_bucket(bucket, q, keys, values, rules))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def mix(self, mixer: nn.Module, hidden: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.mix(mixer, hidden, self.groups)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExactBatch:
    """Takes the place of a PagedBatch in exact mode."""

    cache: KVCache
    slot_mapping: Tensor  # [T] int64; -1 = a row of a decode step that idles
    tiles: Tiles

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> Tensor:
        cached = self.cache.layers[layer]
        store(cached, self.slot_mapping, torch.cat([k, v], dim=-1))
        keys, values = cached.split([k.shape[2], v.shape[2]], dim=-1)
        return attend(q, keys, values, self.tiles, rules)


def measure_cache(model: PreTrainedModel) -> CacheProbe:
    """What each layer of a model, loaded with PAGED_ATTENTION, caches per token or sequence."""
    probe = CacheProbe(model)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        hidden_states(model, input_ids=token, position_ids=token, millrace_paged=probe)
    if not probe.shapes and not probe.layers:
        raise ConfigError(f"{type(model).__name__} does not use transformers' AttentionInterface.")
    return probe


def _attend_bucket(
    bucket: Bucket,
    query: Tensor,  # [num_tokens, H, D]
    keys: Tensor,  # [S, H // G, L, D]
    values: Tensor,  # [S, H // G, L, Dv]
    rules: ScoreRules,
) -> Tensor:  # [num_tokens, H, Dv]
    num_rows, num_queries = bucket.positions.shape
    num_kv_heads, context = keys.shape[1:3]
    num_heads, head_dim = query.shape[1:]
    if bucket.padded is not None:
        query = query[bucket.padded]
    window, scale, mask = rules.window, rules.scale, None
    chunk = None if rules.chunk is None or rules.chunk >= context else rules.chunk
    causal = bucket.fresh and rules.is_plain and chunk is None
    causal = causal and (window is None or window >= context)
    if not causal:
        mask = bucket.mask(window=window, chunk=chunk, context=context, dtype=query.dtype)
    if num_queries == 1 and rules.is_plain:
        # Heads that share a KV head become its queries: one kernel, and no KV is repeated.
        query = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if mask is not None:
            mask = mask.expand(-1, -1, query.shape[2], -1)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return output.reshape(num_rows, num_heads, -1)
    query = query.view(num_rows, num_queries, num_heads, head_dim).transpose(1, 2)
    if not rules.is_plain:
        assert mask is not None
        output = attend_masked(query, keys, values, visible=mask == 0, rules=rules)
    else:
        if mask is not None and query.is_cuda:
            # With a mask, no fused CUDA kernel supports shared KV heads.
            repeats = num_heads // num_kv_heads
            keys, values = (t.repeat_interleave(repeats, dim=1) for t in (keys, values))
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    output = output.transpose(1, 2).reshape(num_rows * num_queries, num_heads, -1)
    return output if bucket.unpadded is None else output[bucket.unpadded]


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H // G, T, D]
    value: Tensor,  # [1, H // G, T, Dv]
    attention_mask: Tensor | None,
    *,
    millrace_paged: (
        PagedBatch | ExactBatch | CacheProbe | DecodeLayer | PrefillLayer | None
    ) = None,
    layout: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_chunk: int | None = None,
    query_scales: Tensor | None = None,  # [1, T]
    **_: Any,  # load_model refuses models that pass anything else of consequence
) -> tuple[Tensor, None]:
    # Rotary embedding runs in the dtype of the residual stream; the cache has the projections'.
    query, key = scaled(query, query_scales).to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is not None:  # a scoring pass, which caches nothing: see scoring.py
        scoring = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        scoring["attention_chunk"] = attention_chunk
        tensors = (query, key, value, None)
        return packed_attention(module, *tensors, layout=layout, scaling=scale, **scoring)
    assert millrace_paged is not None
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    rules = ScoreRules(scale, sliding_window, softcap, s_aux, attention_chunk)
    if isinstance(millrace_paged, DecodeLayer | PrefillLayer):
        # Reading the layer's number here would make torch.compile build a program for each layer.
        return millrace_paged.attend(query, key, value, rules)[None], None
    layer = module.layer_idx
    assert isinstance(layer, int)
    return millrace_paged.attend(layer, query, key, value, rules)[None], None


# Without a mask function of the same name, transformers builds no masks.
AttentionInterface.register(PAGED_ATTENTION, _paged_attention)
