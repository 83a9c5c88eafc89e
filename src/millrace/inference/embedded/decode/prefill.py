"""Attention of prompt chunks on a GPU, by PyTorch's variable-length flash kernel.

Nothing is padded and no mask is built: the queries of all chunks lie end to end, the keys and
values of their contexts too, and the kernel is told where each begins. Like decode attention it is
one opaque operator, so that the layers around it can be compiled.

T = tokens of the pass, L = tokens of all contexts together, S = sequences, H = query heads,
K = KV heads, D = head size.
"""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.attention import define_operator
from millrace.inference.embedded.kv.cache import KVCache, KVShape

_MAX_HEAD_DIM = 256


def flash_obstacle(shapes: Iterable[KVShape], *, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot compute what some of these layers want; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"engine.dtype is {str(dtype).removeprefix('torch.')}"
    for shape in shapes:
        key_dim, value_dim = shape.key_dim, shape.value_dim
        if key_dim != value_dim or key_dim > _MAX_HEAD_DIM or key_dim % 8:
            return f"its head sizes are {key_dim} and {value_dim}"
        if shape.is_capped:
            return "the model softcaps its attention scores"
    return None


def can_flash(cache: KVCache, *, model: PreTrainedModel) -> bool:
    """Whether prefill can use the flash kernel; warns where it should and cannot."""
    if model.device.type != "cuda":
        return False
    obstacle = flash_obstacle(cache.shapes.values(), dtype=model.dtype)
    if obstacle is not None:
        warnings.warn(
            f"Prefill does not use the flash kernel because {obstacle}: it pads prompts of"
            " different lengths and takes several times as long.",
            stacklevel=2,
        )
    return obstacle is None


class PrefillLayer(NamedTuple):
    """What one layer's attention needs in a prefill pass; a NamedTuple like DecodeLayer."""

    cache: Tensor  # [slots, K, 2 D]
    slot_mapping: Tensor  # [T] int64; where each token's key and value go
    context_slots: Tensor  # [L] int64; [0] = every chunk begins its sequence
    query_starts: Tensor  # [S + 1] int32
    context_starts: Tensor  # [S + 1] int32
    max_queries: int
    max_context: int

    def attend(
        self,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, K, T, D]
        value: Tensor,  # [1, K, T, D]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [1, T, H, D]
        assert softcap is None, "see flash_obstacle"
        output = torch.ops.millrace.flash_prefill(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.cache,
            self.slot_mapping,
            self.context_slots,
            self.query_starts,
            self.context_starts,
            self.max_queries,
            self.max_context,
            scale,
            window or 0,
        )
        return output[None]


def flash_prefill(
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
) -> Tensor:  # [T, H, D]
    """Attention of the chunks' tokens, which are stored in the cache."""
    cache.index_copy_(0, slot_mapping, torch.cat([key, value], dim=-1))
    if len(context_slots):
        key, value = cache.index_select(0, context_slots).chunk(2, dim=-1)
    output, *_ = torch.ops.aten._flash_attention_forward(
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
    return output


def _shape(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


# Written to without being declared, for the reason given at paged_decode.
define_operator(
    "flash_prefill(Tensor query, Tensor key, Tensor value, Tensor cache, Tensor slot_mapping,"
    " Tensor context_slots, Tensor query_starts, Tensor context_starts, SymInt max_queries,"
    " SymInt max_context, float scale, SymInt window) -> Tensor",
    cuda=flash_prefill,
    shape=_shape,
)
