"""Attention that adds in the same order for a token, however its sequence is cut and batched.

The keys of a sequence are read in blocks that begin at its first token. A block that a query does
not see adds exact zeros, so a query gets the same bits in a prefill chunk, in a decode step and in
a packed microbatch. Queries of one sequence lie in tiles of a constant size, as rows of the same
products. Keys are found through a table, which lists blocks of a KV cache or rows of a microbatch.

T = rows of a pass, N = tiles, Q = queries of a tile, S = sequences, H = query heads, K = KV heads,
G = query heads per KV head, D and E = head sizes of keys and values, B = keys of a block.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from millrace.core.errors import ConfigError
from millrace.models.attention import flash
from millrace.models.attention.layout import PackedLayout, ScoreRules
from millrace.models.exact.mode import refuse

_CPU_QUERIES = 8
_CPU_KEYS = 64  # of a block
CUDA_QUERIES = 16


class KeyTables(NamedTuple):
    """Where the keys of sequences are: the token at position p of sequence s has the slot
    entries[offsets[s] + p // block_tokens] * block_tokens + p % block_tokens."""

    entries: Tensor  # [...] int64
    offsets: Tensor  # [S] int64
    block_tokens: int

    def slots(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """[N, B] of sequences [N] and positions [N, B]."""
        block, within = positions // self.block_tokens, positions % self.block_tokens
        return self.entries[self.offsets[sequences][:, None] + block] * self.block_tokens + within


class Tiles(NamedTuple):
    """Tiles of queries: consecutive rows of one sequence each."""

    sequences: Tensor  # [N] int64
    rows: Tensor  # [N] int64; the first of each
    counts: Tensor  # [N] int64; 0 = idle
    positions: Tensor  # [N] int64; of the first query, from the first token of its sequence
    tables: KeyTables
    size: int  # queries that a tile has room for

    @classmethod
    def of(
        cls, starts: np.ndarray, counts: np.ndarray, *, tables: KeyTables, device: torch.device
    ) -> "Tiles":
        """Rows end to end: sequence s has counts[s] queries, the first at position starts[s]."""
        size = CUDA_QUERIES if device.type == "cuda" else _CPU_QUERIES
        num_tiles = -(-counts // size)
        own = np.repeat(np.arange(len(counts)), num_tiles)
        within = np.arange(len(own)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        first = within * size
        rows = (np.cumsum(counts) - counts)[own] + first
        columns = (own, rows, np.minimum(counts[own] - first, size), starts[own] + first)
        numbers = torch.from_numpy(np.stack(columns).astype(np.int64)).to(device)
        return cls(*numbers, tables=tables, size=size)

    @classmethod
    def single(cls, positions: Tensor, lengths: Tensor, *, tables: Tensor, block: int) -> "Tiles":
        """One query per row, the last of `lengths` [B] tokens; 0 = idle. `tables` [B, W]: blocks of
        `block` tokens. Runs inside CUDA graphs."""
        numbers = torch.arange(len(lengths), device=lengths.device)
        found = KeyTables(tables.flatten(), numbers * tables.shape[1], block)
        return cls(numbers, numbers, (lengths > 0).long(), positions, found, 1)

    @classmethod
    def packed(cls, layout: PackedLayout, device: torch.device) -> "Tiles":
        """The tiles of a microbatch, in which a segment follows its parent."""
        lengths, starts = layout.lengths, layout.first_positions
        keys = [layout.path(n) for n in range(len(lengths))]
        ends = np.cumsum(starts + lengths)
        numbers = (np.concatenate(keys), ends - starts - lengths)
        entries, offsets = (torch.from_numpy(n.astype(np.int64)).to(device) for n in numbers)
        tables = KeyTables(entries, offsets, 1)
        return cls.of(starts, lengths, tables=tables, device=device)


def store(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, K, D + E] to their slots [T] of a cache; a slot of -1 drops its row."""
    with torch._C.DisableTorchFunction():
        if cache.is_cuda:
            from millrace.models.exact import exact_kernels

            exact_kernels.store(cache, slots, rows)
        else:
            cache[slots[slots >= 0]] = rows[slots >= 0]


def attend(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [slots, K, D]
    value: Tensor,  # [slots, K, E]
    tiles: Tiles,
    rules: ScoreRules,
) -> Tensor:  # [T, H, E]
    """Attention of every row; differentiable on a CPU."""
    _check_rules(rules, device=query.device)
    with torch._C.DisableTorchFunction():
        if query.is_cuda:
            from millrace.models.exact import exact_kernels

            return exact_kernels.attend(query, key, value, tiles, rules)[0]
        return _attend_on_cpu(query, key, value, tiles, rules)


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, rules: ScoreRules
) -> Tensor:
    num_heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    last = (tiles.positions + tiles.counts - 1).clamp_min(0)
    # Tiles with the most keys come first, so that those with a block are a slice.
    order = last.argsort(descending=True)
    sequences, rows, counts, positions = (x[order] for x in tiles[:4])
    last = last[order]
    columns = torch.arange(tiles.size)
    within = torch.minimum(columns, (counts - 1).clamp_min(0)[:, None])  # [N, Q]
    places = positions[:, None] + within
    # [N, K, G * Q, D]
    grouped = query[rows[:, None] + within].unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)
    grouped = grouped.flatten(2, 3).float()
    scores, values = [], []
    for begin in range(0, int(last.max()) + 1, _CPU_KEYS):
        num = int((last >= begin).sum())
        at = begin + torch.arange(_CPU_KEYS)
        slots = tiles.tables.slots(sequences[:num], torch.minimum(at, last[:num, None]))
        behind = places[:num, :, None] - at  # [n, Q, B]
        seen = behind >= 0 if rules.window is None else (behind >= 0) & (behind < rules.window)
        if rules.chunk is not None:
            seen &= at >= (places[:num] // rules.chunk * rules.chunk)[:, :, None]
        keys = key[slots].float().permute(0, 2, 3, 1)  # [n, K, D, B]
        products = _batched(grouped[:num], keys) * rules.scale
        if rules.softcap is not None:
            products = torch.tanh(products / rules.softcap) * rules.softcap
        hidden = ~seen[:, None].repeat(1, 1, groups, 1)
        scores.append(products.masked_fill(hidden, -torch.inf))
        values.append(value[slots].float().transpose(1, 2))  # [n, K, B, E]
    most = torch.full(grouped.shape[:3], -torch.inf)
    for part in scores:
        most[: len(part)] = torch.maximum(most[: len(part)], part.detach().amax(-1))
    total: Any = 0
    for part, own in zip(scores, values, strict=True):
        weights = (part - most[: len(part), ..., None]).exp()
        sums = torch.cat([_batched(weights, own), weights.sum(-1, keepdim=True)], -1)
        total = total + torch.nn.functional.pad(sums, (0, 0) * 3 + (0, len(order) - len(part)))
    output = (total[..., :-1] / total[..., -1:]).unflatten(2, (groups, -1))  # [N, K, G, Q, E]
    output = output.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, value.shape[2])
    result = torch.zeros(len(query), num_heads, value.shape[2])
    is_real = (columns < counts[:, None]).flatten()
    places = (rows[:, None] + within).flatten()[is_real]
    return result.index_copy(0, places, output[is_real]).to(value.dtype)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _check_rules(rules: ScoreRules, *, device: torch.device) -> None:
    if rules.sinks is not None:
        refuse("attention sinks")
    if rules.chunk is not None and device.type == "cuda":
        refuse("attention within chunks of the context")


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, rules: ScoreRules, *, layout: PackedLayout
) -> Tensor:
    """Attention of a microbatch: T rows of q, k and v each. It is differentiable."""
    _check_rules(rules, device=q.device)
    q, k = q.to(v.dtype), k.to(v.dtype)
    with torch._C.DisableTorchFunction():
        if q.is_cuda:
            obstacle = flash.packed_obstacle(q, k, v, layout, rules)
            _refuse_training(obstacle, num_heads=q.shape[1], num_kv_heads=v.shape[1])
            return _PackedAttention.apply(q, k, v, layout, tiles, rules)
        return _attend_on_cpu(q, k, v, tiles, rules)


def check_trainable(config: PreTrainedConfig, device: torch.device, *, max_context: int) -> None:
    """Raise ConfigError for a model that exact mode cannot train on a device, as far as its text
    configuration tells. `max_context`: length of the longest sequence in tokens."""
    if device.type != "cuda":
        return
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    plain_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    key_dim = getattr(config, "qk_head_dim", None) or plain_dim
    obstacle = flash.flash_obstacle(
        torch.bfloat16,
        head_dims=(key_dim, getattr(config, "v_head_dim", None) or key_dim),
        is_capped=getattr(config, "attn_logit_softcapping", None) is not None,
        on_flash_gpu=True,  # the first pass knows
    )
    window, kinds = (getattr(config, name, None) for name in ("sliding_window", "layer_types"))
    is_used = not kinds or "sliding_attention" in kinds
    if is_used and window is not None and window < max_context:
        obstacle = f"{flash.SHORT_WINDOW} (engine.max_context = {window} would limit them)"
    _refuse_training(obstacle, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _refuse_training(obstacle: str | None, *, num_heads: int, num_kv_heads: int) -> None:
    if num_heads > 16 * num_kv_heads:
        obstacle = "more than 16 query heads share a KV head"
    if obstacle is not None:
        raise ConfigError(
            f"fidelity.mode = 'exact' needs the flash kernel on a GPU, which cannot be used because"
            f" {obstacle}; set fidelity.mode to 'fast'."
        )


class _PackedAttention(torch.autograd.Function):
    """Exact attention on CUDA, with the backward pass of the flash kernel."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Any, tiles: Tiles, rules: ScoreRules
    ) -> Tensor:
        from millrace.models.exact import exact_kernels

        output, lse = exact_kernels.attend(q, k, v, tiles, rules)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.layout, ctx.rules = layout, rules
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        rules = ctx.rules
        calls = flash.calls_of(ctx.layout.calls, window=rules.window, scale=rules.scale)
        tensors = (grad.contiguous(), *ctx.saved_tensors)
        return *flash.attend_backward(flash.FlashKernel(), *tensors, calls=calls), None, None, None
