"""Attention of decode steps and of prefill chunks: store new keys and values, then attend.

Each is one opaque operator: torch.compile sees a single node between the projections, and Millrace
decides what runs inside. Decode runs a Triton kernel on CUDA and plain PyTorch elsewhere, which is
the reference of the kernel's tests. Prefill on CUDA runs PyTorch's variable-length flash kernel:
queries and contexts of all chunks lie end to end, without padding or masks.

B = rows of a decode step (one sequence with one new token each), T = tokens of a prefill pass,
L = tokens of all its contexts, S = its sequences, H = query heads, K = KV heads, D and E = head
sizes of keys and values, W = blocks per row of a block table.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.inference.embedded.kv.cache import KVCache, from_entries, to_entries
from millrace.models.attention.flash import add_sinks, flash_obstacle
from millrace.models.attention.layout import FLASH_CAPABILITY, ScoreRules
from millrace.models.attention.packed import attend_masked

_LIBRARY = torch.library.Library("millrace", "FRAGMENT")


def define_operator(
    schema: str,
    *,
    cuda: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    cpu: Callable[..., Tensor] | None = None,
) -> None:
    """Make torch.ops.millrace.NAME. `shape` returns an empty tensor like the result. An operator
    that writes to an argument does not declare it: torch.compile would copy the tensor around the
    operator whenever it cannot prove that writing in place is safe. It is safe, because nothing
    else in a layer touches the tensor, and whatever reads it next depends on the output, too."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cuda, "CUDA")
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"millrace::{name}", shape, lib=_LIBRARY)


class Rotation(NamedTuple):
    """What queries and keys need after their projection: a norm per head, if the model has one, and
    rotary embedding, whose angles depend on the position alone."""

    angles: Tensor  # [positions, 2, D / 2] float32; cosines and sines
    norms: tuple[Tensor, Tensor] | None  # [D] each; weights of the norms of queries and keys
    eps: float  # of the norms


class DecodeLayer(NamedTuple):
    """What the attention of one layer needs in a decode step. A NamedTuple, because torch.compile
    looks through it: the cache of each layer is then an input of one compiled program instead of a
    reason to compile the next layer again. The tables and lengths may have rows to spare, so that
    their shapes are the same for every B."""

    cache: Tensor  # [slots, K, D + E], or entries of kv/cache.py in FP8
    tables: Tensor  # [B or more, W] int32; blocks of each row
    lengths: Tensor  # [B or more] int64; tokens of each row with the new one; 0 = the row is idle
    splits: Tensor  # [S or more, 4] int32; see splits.py
    arrivals: Tensor  # [B or more, K] int32; zeros
    block_tokens: int
    num_splits: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rules: ScoreRules) -> Tensor:
        """[B, H, E], of query [B, H, D], key [B, K, D] and value [B, K, E]."""
        scores = rules.scale, rules.window or 0, rules.softcap or 0.0, rules.sinks, rules.chunk or 0
        return torch.ops.millrace.paged_decode(query, key, value, *self, *scores)

    def attend_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, rules: ScoreRules, rotation: Rotation
    ) -> Tensor:
        """attend() on CUDA, of queries and keys as projected."""
        from millrace.inference.embedded.decode.kernels import attention_kernels

        scores = rules.scale, rules.window or 0, rules.softcap or 0.0, rules.sinks, rules.chunk or 0
        return attention_kernels.paged_decode(query, key, value, *self, *scores, rotation=rotation)


class PrefillLayer(NamedTuple):
    """What the attention of one layer needs in a prefill pass; a NamedTuple like DecodeLayer."""

    cache: Tensor  # [slots, K, 2 D], or entries of kv/cache.py in FP8
    slot_mapping: Tensor  # [T] int64; where each token's key and value go
    context_slots: Tensor  # [L] int64; [0] = every chunk begins its sequence
    query_starts: Tensor  # [S + 1] int32
    context_starts: Tensor  # [S + 1] int32
    max_queries: int
    max_context: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rules: ScoreRules) -> Tensor:
        """[T, H, D], of query [T, H, D], key [T, K, D] and value [T, K, D]."""
        assert rules.softcap is None, "see can_flash"  # nor does a chunk end within the context
        scores = (rules.scale, rules.window or 0, rules.sinks)
        return torch.ops.millrace.flash_prefill(query, key, value, *self, *scores)


def can_flash(cache: KVCache, *, model: PreTrainedModel) -> bool:
    """Whether prefill can use the flash kernel; warns if a GPU cannot use it."""
    if model.device.type != "cuda":
        return False
    on_flash_gpu = torch.cuda.get_device_capability(model.device) >= FLASH_CAPABILITY
    obstacles = [
        flash_obstacle(
            model.dtype,
            head_dims=(shape.key_dim, shape.value_dim),
            is_capped=shape.is_capped,
            on_flash_gpu=on_flash_gpu,
        )
        for shape in cache.shapes.values()
    ]
    obstacle = next(filter(None, obstacles), None)
    if obstacle is not None:
        warnings.warn(
            f"Prefill does not use the flash kernel because {obstacle}: it pads prompts of"
            " different lengths and takes several times as long.",
            stacklevel=2,
        )
    return obstacle is None


def _decode_on_cuda(*arguments: Any) -> Tensor:
    from millrace.inference.embedded.decode.kernels import attention_kernels

    return attention_kernels.paged_decode(*arguments)


def plain_decode(
    query: Tensor,  # [B, H, D]
    key: Tensor,  # [B, K, D]
    value: Tensor,  # [B, K, E]
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    _splits: Tensor,
    _arrivals: Tensor,
    block_tokens: int,
    _num_splits: int,
    scale: float,
    window: int,  # 0 = none
    cap: float,  # 0 = none
    sinks: Tensor | None,  # [H]
    chunk: int = 0,  # 0 = none
) -> Tensor:  # [B, H, E]
    """Decode attention in plain PyTorch, on any device, without splits."""
    tables, lengths = tables[: len(query)], lengths[: len(query)]
    busy = lengths > 0
    rows = torch.arange(len(lengths), device=lengths.device)
    at = (lengths - 1).clamp_min(0).long()
    slots = tables[rows, at // block_tokens].long() * block_tokens + at % block_tokens
    cache[slots[busy]] = to_entries(key, value, cache)[busy]
    context = max(int(lengths.max()), 1)
    at = torch.arange(context, device=lengths.device)
    slots = tables[:, at // block_tokens].long() * block_tokens + at % block_tokens  # [B, L]
    entries = cache[slots].transpose(1, 2)  # [B, K, L, D + E], or in FP8
    ends = lengths[:, None].long()
    seen = (at < ends) & (at >= ends - window) if window else at < ends
    if chunk:
        seen &= at >= (ends - 1) // chunk * chunk
    dims = {"key_dim": key.shape[2], "value_dim": value.shape[2]}
    keys, values = from_entries(entries, **dims, dtype=value.dtype)
    rules, visible = ScoreRules(scale, softcap=cap or None, sinks=sinks), seen[:, None, None]
    output = attend_masked(query[:, :, None], keys, values, visible=visible, rules=rules)
    return output[:, :, 0].nan_to_num(0.0)  # NaN: a row that sees nothing


def _flash_prefill(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, K, D]
    value: Tensor,  # [T, K, D]
    cache: Tensor,
    slot_mapping: Tensor,
    context_slots: Tensor,
    query_starts: Tensor,
    context_starts: Tensor,
    max_queries: int,
    max_context: int,
    scale: float,
    window: int,  # 0 = none
    sinks: Tensor | None,  # [H]
) -> Tensor:  # [T, H, D]
    entries = to_entries(key, value, cache)
    cache.index_copy_(0, slot_mapping, entries)
    if len(context_slots):
        entries = cache.index_select(0, context_slots)
    if len(context_slots) or cache.dtype == torch.uint8:
        dims = {"key_dim": key.shape[2], "value_dim": value.shape[2]}
        key, value = from_entries(entries, **dims, dtype=value.dtype)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        query_starts,
        context_starts,
        max_queries,
        max_context,
        0.0,  # dropout
        True,  # causal; the last query of a chunk sees its whole context
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    return output if sinks is None else add_sinks(output, lse, sinks)[0]


define_operator(
    "paged_decode(Tensor query, Tensor key, Tensor value, Tensor cache, Tensor tables,"
    " Tensor lengths, Tensor splits, Tensor arrivals, SymInt block_tokens, SymInt num_splits,"
    " float scale, SymInt window, float cap, Tensor? sinks, SymInt chunk=0) -> Tensor",
    cpu=plain_decode,
    cuda=_decode_on_cuda,
    shape=lambda query, key, value, *_: query.new_empty(*query.shape[:2], value.shape[2]),
)
define_operator(
    "flash_prefill(Tensor query, Tensor key, Tensor value, Tensor cache, Tensor slot_mapping,"
    " Tensor context_slots, Tensor query_starts, Tensor context_starts, SymInt max_queries,"
    " SymInt max_context, float scale, SymInt window, Tensor? sinks) -> Tensor",
    cuda=_flash_prefill,
    shape=lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
