"""Attention of a decode step, as one opaque operator: store the new keys and values, then attend.

One operator, so that torch.compile sees a single node between the projections and Millrace decides
what runs inside: a Triton kernel on CUDA, plain PyTorch elsewhere (the oracle of the kernel's
tests). Each row of a step is one sequence with one new token.

B = rows, H = query heads, K = KV heads, D and E = head sizes of keys and values, W = blocks per
row of the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("millrace", "FRAGMENT")


def define_operator(
    schema: str,
    *,
    cuda: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    cpu: Callable[..., Tensor] | None = None,
) -> None:
    """Make torch.ops.millrace.NAME. `shape` returns an empty tensor like the result."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cuda, "CUDA")
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"millrace::{name}", shape, lib=_LIBRARY)


class DecodeLayer(NamedTuple):
    """What one layer's attention needs in a decode step.

    A NamedTuple, because torch.compile looks through it: the cache of each layer is then an input
    of one compiled program instead of a reason to compile the next layer again. The tables and
    lengths may have rows to spare: then their shapes are the same for every B.
    """

    cache: Tensor  # [slots, K, D + E]
    tables: Tensor  # [B or more, W] int32; blocks of each row
    lengths: Tensor  # [B or more] int64; tokens of each row with the new one; 0 = the row is idle
    block_tokens: int
    splits: int  # parts of a row's context that attend side by side; a power of two

    def attend(
        self,
        query: Tensor,  # [1, H, B, D]
        key: Tensor,  # [1, K, B, D]
        value: Tensor,  # [1, K, B, E]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [1, B, H, E]
        output = torch.ops.millrace.paged_decode(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.cache,
            self.tables,
            self.lengths,
            self.block_tokens,
            self.splits,
            scale,
            window or 0,
            softcap or 0.0,
        )
        return output[None]


def _on_cuda(*arguments: Any) -> Tensor:
    from millrace.inference.embedded.decode import attention_kernels

    return attention_kernels.paged_decode(*arguments)


def plain_decode(
    query: Tensor,  # [B, H, D]
    key: Tensor,  # [B, K, D]
    value: Tensor,  # [B, K, E]
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    block_tokens: int,
    splits: int,
    scale: float,
    window: int,  # 0 = none
    cap: float,  # 0 = none
) -> Tensor:  # [B, H, E]
    """Store the newest token of each row and attend from it; plain PyTorch, on any device."""
    key_dim = key.shape[2]
    tables, lengths = tables[: len(query)], lengths[: len(query)]
    busy = lengths > 0
    rows = torch.arange(len(lengths), device=lengths.device)
    at = (lengths - 1).clamp_min(0).long()
    slots = tables[rows, at // block_tokens].long() * block_tokens + at % block_tokens
    cache[slots[busy]] = torch.cat([key, value], dim=-1)[busy]
    context = max(int(lengths.max()), 1)
    at = torch.arange(context, device=lengths.device)
    slots = tables[:, at // block_tokens].long() * block_tokens + at % block_tokens  # [B, L]
    entries = cache[slots].repeat_interleave(query.shape[1] // key.shape[1], dim=2)  # [B, L, H, .]
    scores = torch.einsum("bhd,blhd->bhl", query, entries[..., :key_dim]).float() * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    ends = lengths[:, None].long()
    seen = at < ends
    if window:
        seen &= at >= ends - window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0).to(query.dtype)  # NaN: a row that sees nothing
    return torch.einsum("bhl,blhe->bhe", weights, entries[..., key_dim:])


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


# The cache is written to, and not declared as such: declared, torch.compile would copy it around
# the operator whenever it cannot prove that in place is safe. It is: nothing else in a layer
# touches the cache, and whoever needs the result needs the output of this operator.
define_operator(
    "paged_decode(Tensor query, Tensor key, Tensor value, Tensor cache, Tensor tables,"
    " Tensor lengths, SymInt block_tokens, SymInt splits, float scale, SymInt window, float cap)"
    " -> Tensor",
    cpu=plain_decode,
    cuda=_on_cuda,
    shape=_shape,
)
