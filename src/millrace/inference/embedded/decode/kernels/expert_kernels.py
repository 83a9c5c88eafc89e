"""Triton kernels of experts for few rows per expert: reading the weights takes most of the time.

Per layer, one kernel chooses experts by a router's scores, one groups rows by expert, one computes
gate, up and activation, and the last product writes each row weighted. A program walks the rows of
one expert for one tile of its weights, so that each weight is read once. Sums are float32.

Routes are recorded by one kernel per layer, because steps of small batches are made of launches.

Imported on machines with CUDA only. T = tokens, K = experts per token, S = T K rows, E = experts,
I = hidden size, M = inner size of an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.decode.kernels.overlap_kernels import begin_kernel, overlap_options

MAX_ROWS = 4096  # S; more are a matter of the tensor cores, not of the memory


@triton.jit
def _group_kernel(
    indices,
    order,  # [S]; rows by expert
    starts,  # [E + 1]; where those of each expert begin
    num_rows,
    num_experts,
    ROWS_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    expert = tl.program_id(0)
    at = tl.arange(0, ROWS_PAD)
    chosen = tl.load(indices + at, mask=at < num_rows, other=num_experts)
    is_own = chosen == expert
    number = is_own.to(tl.int32)
    start = tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(order + start + tl.cumsum(number, 0) - 1, at, mask=is_own)
    tl.store(starts + expert, start)
    tl.store(starts + num_experts, num_rows)


@triton.jit
def _gate_up_kernel(
    hidden,  # [T, I]
    gate_up,  # [E, 2 M, I]
    order,
    starts,
    inner,  # [S, M], rows by expert
    hidden_size,
    inner_size,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    expert = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    gates = gate_up + expert.to(tl.int64) * (2 * inner_size * hidden_size)
    gates += columns[None, :] * hidden_size + depth[:, None]
    ups = gates + inner_size * hidden_size
    for begin in range(first, last, ROWS):
        rows = begin + tl.arange(0, ROWS)
        is_row = (rows < last)[:, None]
        tokens = tl.load(order + rows, mask=rows < last, other=0) // TOP_K
        x = hidden + tokens[:, None] * hidden_size + depth[None, :]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, hidden_size, DEPTH):
            a = tl.load(x + at, mask=is_row, other=0.0).to(gate_up.dtype.element_ty)
            gate = tl.dot(a, tl.load(gates + at), gate)
            up = tl.dot(a, tl.load(ups + at), up)
        value = gate * tl.sigmoid(gate) * up
        place = inner + rows[:, None] * inner_size + columns[None, :]
        tl.store(place, value.to(inner.dtype.element_ty), mask=is_row)


@triton.jit
def _down_kernel(
    inner,  # [S, M]
    down,  # [E, I, M]
    order,
    starts,
    weights,  # [S]
    out,  # [S, I] float32; in the order of the tokens
    hidden_size,
    inner_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    expert = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    downs = down + expert.to(tl.int64) * (hidden_size * inner_size)
    downs += columns[None, :] * inner_size + depth[:, None]
    for begin in range(first, last, ROWS):
        rows = begin + tl.arange(0, ROWS)
        is_row = (rows < last)[:, None]
        x = inner + rows[:, None] * inner_size + depth[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, inner_size, DEPTH):
            a = tl.load(x + at, mask=is_row, other=0.0)
            total = tl.dot(a, tl.load(downs + at), total)
        targets = tl.load(order + rows, mask=rows < last, other=0)
        weight = tl.load(weights + targets, mask=rows < last, other=0.0).to(tl.float32)
        place = out + targets[:, None] * hidden_size + columns[None, :]
        tl.store(place, total * weight[:, None], mask=is_row)


def experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:  # [T, I]
    """The sum of expert_outputs()."""
    return expert_outputs(hidden, indices, weights, gate_up, down).sum(1).to(hidden.dtype)


def expert_outputs(
    hidden: Tensor,  # [T, I]
    indices: Tensor,  # [T, K] int64
    weights: Tensor,  # [T, K]
    gate_up: Tensor,  # [E, 2 M, I]
    down: Tensor,  # [E, I, M]
) -> Tensor:  # [T, K, I] float32
    """The weighted outputs of the chosen experts, each down(silu(gate(x)) * up(x))."""
    (num_tokens, top_k), (num_experts, hidden_size, inner_size) = indices.shape, down.shape
    num_rows = num_tokens * top_k
    integers = {"dtype": torch.int32, "device": hidden.device}
    order = torch.empty(num_rows, **integers)
    starts = torch.empty(num_experts + 1, **integers)
    inner = gate_up.new_empty(num_rows, inner_size)
    out = torch.empty(num_rows, hidden_size, dtype=torch.float32, device=hidden.device)
    padded = triton.next_power_of_2(num_rows)
    overlap = overlap_options()
    _group_kernel[(num_experts,)](
        indices.contiguous(), order, starts, num_rows, num_experts, ROWS_PAD=padded, **overlap
    )
    groups = (order, starts)
    rows = 16 if num_rows <= 6 * num_experts else 32 if num_rows <= 24 * num_experts else 64
    depth = 64 if hidden_size % 128 or inner_size % 128 else 128
    # On an H200, these read the weights at the rate of a large copy.
    tiles = {"ROWS": rows, "COLUMNS": 64, "DEPTH": depth, "num_warps": 4, "num_stages": 3}
    tiles |= overlap
    sizes = {"hidden_size": hidden_size, "inner_size": inner_size}
    _gate_up_kernel[(inner_size // tiles["COLUMNS"], num_experts)](
        hidden.contiguous(), gate_up, *groups, inner, **sizes, TOP_K=top_k, **tiles
    )
    _down_kernel[(hidden_size // tiles["COLUMNS"], num_experts)](
        inner, down, *groups, weights.contiguous(), out, **sizes, **tiles
    )
    return out.view(num_tokens, top_k, hidden_size)


@triton.jit
def _route_kernel(
    parts,  # [P, T, E]; of scores
    chosen,  # [T, K] int64
    weights,  # [T, K] float32
    num_tokens,
    num_experts,
    NUM_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    NORMALIZES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    row = tl.program_id(0)
    expert, rank = tl.arange(0, EXPERTS_PAD), tl.arange(0, TOP_K_PAD)
    is_expert = expert < num_experts
    score = tl.zeros([EXPERTS_PAD], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        place = parts + (part * num_tokens + row) * num_experts + expert
        score += tl.load(place, mask=is_expert, other=0.0)
    score = tl.where(is_expert, score, -float("inf"))
    weight = tl.exp(score - tl.max(score, 0))
    share = weight / tl.sum(weight, 0)
    ids = tl.zeros([TOP_K_PAD], tl.int64)
    shares = tl.zeros([TOP_K_PAD], tl.float32)
    for number in tl.static_range(TOP_K):
        # Of equal scores the first. With NaN, it may be anywhere.
        best = tl.minimum(tl.argmax(score, 0), num_experts - 1)
        ids = tl.where(rank == number, best.to(tl.int64), ids)
        shares = tl.where(rank == number, tl.sum(tl.where(expert == best, share, 0.0), 0), shares)
        score = tl.where(expert == best, -float("inf"), score)
    if NORMALIZES:
        shares = shares / tl.sum(shares, 0)
    target = row * TOP_K + rank
    tl.store(chosen + target, ids, mask=rank < TOP_K)
    tl.store(weights + target, shares, mask=rank < TOP_K)


def route(parts: Tensor, *, top_k: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """The experts [T, K] int64 with the highest scores, whose parts [P, T, E] float32 are summed,
    and their probabilities [T, K] float32, divided by their sum if `normalizes`."""
    num_parts, num_tokens, num_experts = parts.shape
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int64, device=parts.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=parts.device)
    _route_kernel[(num_tokens,)](
        parts,
        chosen,
        weights,
        num_tokens,
        num_experts,
        NUM_PARTS=num_parts,
        TOP_K=top_k,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        TOP_K_PAD=triton.next_power_of_2(top_k),
        NORMALIZES=normalizes,
        num_warps=1,
        **overlap_options(),
    )
    return chosen, weights


@triton.jit
def _record_kernel(chosen, pool, kv_slots, out, num_rows, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < num_rows
    expert = tl.load(chosen + at, mask=is_row)
    slot = tl.load(kv_slots + at // TOP_K, mask=is_row)
    tl.store(pool + slot * TOP_K + at % TOP_K, expert.to(pool.dtype.element_ty), mask=is_row)
    tl.store(out + at, expert, mask=is_row)


def record_routes(
    chosen: Tensor,  # [T, K] int64
    pool: Tensor,  # [KV slots, K] uint8 or int16; written
    kv_slots: Tensor,  # [T] int64
) -> Tensor:  # a copy of `chosen`: operators do not return their arguments
    chosen = chosen.contiguous()
    out = torch.empty_like(chosen)
    num_rows, block = chosen.numel(), 1024
    _record_kernel[(triton.cdiv(num_rows, block),)](
        chosen, pool, kv_slots, out, num_rows, TOP_K=chosen.shape[1], BLOCK=block
    )
    return out
