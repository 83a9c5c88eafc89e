"""Variable-length flash attention over packed segments, without padding and without masks.

Promise: exact attention of every row to its segment and to all segments that this one continues,
with kernels that support contiguous spans only. One call is made for every segment with itself,
causally, and one for each level of the trees: all rows below a segment with that segment, without a
mask. Their outputs are merged by log-sum-exp.

The backward pass gives each call the merged output and the merged log-sum-exp. With
P = exp(s - lse), a kernel's gradient of a score is P * (dP - rowsum(dO * O)). It needs nothing else
of the forward pass, so with the merged values each call gives exactly its share of the gradient.

A sink, one more score per head whose value is 0, is merged in the same way (GPT-OSS).

Both passes are custom operators, so a compiled layer contains each as one node.

T = rows, H = heads, D = head size, O = rows below the segments of a level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millrace.models.attention.layout import FlatCalls, PackedLayout, ScoreRules

SHORT_WINDOW = "the model's window is shorter than the sequences, which share prefixes"
_MAX_HEAD_DIM = 256

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


def flash_obstacle(
    dtype: torch.dtype, *, head_dims: tuple[int, int], is_capped: bool, on_flash_gpu: bool
) -> str | None:
    """Why the flash kernel cannot be used; None if it can. `head_dims`: of keys and of values."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {dtype} (set its dtype to bfloat16)"
    key_dim, value_dim = head_dims
    if key_dim % 8 or key_dim > _MAX_HEAD_DIM or key_dim != value_dim:
        return f"its head sizes are {key_dim} and {value_dim}"
    if is_capped:
        return "the model softcaps its attention scores"
    return None if on_flash_gpu else "the GPU is older than Ampere"


def packed_obstacle(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rules: ScoreRules
) -> str | None:
    """Why the flash kernel cannot compute a microbatch; None if it can."""
    if rules.window is not None and layout.shares_rows:
        return SHORT_WINDOW
    return flash_obstacle(
        q.dtype if q.dtype == k.dtype == v.dtype else torch.float32,
        head_dims=(q.shape[-1], v.shape[-1]),
        is_capped=rules.softcap is not None,
        on_flash_gpu=layout.on_flash_gpu,
    )


class Spans(NamedTuple):
    """Span i holds the rows from bounds[i] to bounds[i + 1] (cu_seqlens)."""

    bounds: Tensor  # [spans + 1] int32
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VarlenArgs:
    """A variable-length call: queries of span i attend to keys of span i, to all or causally."""

    queries: Spans
    keys: Spans
    causal: bool
    window: int | None  # keys that a query attends to, itself included; None = all
    scale: float  # of the scores


class FlashKernel:
    """PyTorch's flash attention: CUDA, bfloat16 or float16, grouped-query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] and log-sum-exp of the scores [H, T], in float32 or more."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_spans(args), 0.0, args.causal, False, **_options(args)
        )
        return out, lse

    def backward(self, *tensors: Tensor, args: VarlenArgs) -> Gradients:
        """`tensors`: the gradient of the output, q, k, v, the output and the log-sum-exp."""
        device = tensors[0].device
        seed = torch.zeros(2, dtype=torch.uint64, device=device)  # of dropout, which is off
        random = (seed, torch.empty(0, device=device))
        return torch.ops.aten._flash_attention_backward(
            *tensors, *_spans(args), 0.0, args.causal, *random, **_options(args)
        )


def _spans(args: VarlenArgs) -> tuple[Tensor, Tensor, int, int]:
    # At least 2: for single queries the kernel would use another layout of grouped heads.
    queries, keys = args.queries, args.keys
    return queries.bounds, keys.bounds, max(2, queries.longest), max(2, keys.longest)


def _options(args: VarlenArgs) -> dict[str, float]:
    left = -1 if args.window is None else args.window - 1
    right = 0 if args.causal else -1
    return {"scale": args.scale, "window_size_left": left, "window_size_right": right}


class KernelCall(NamedTuple):
    args: VarlenArgs
    keys: slice | Tensor  # their rows in the microbatch
    queries: slice | Tensor


def calls_of(flat: FlatCalls, *, window: int | None, scale: float) -> list[KernelCall]:
    """The first one is that of segments with themselves."""
    calls: list[KernelCall] = []
    bound = row = 0
    for num_spans, *longest, first_key, num_keys, first_query, num_queries in flat.table.tolist():
        spans, places = [], []
        pairs = ((first_key, num_keys), (first_query, num_queries))
        for most, (first, count) in zip(longest, pairs, strict=True):
            spans.append(Spans(flat.bounds[bound : bound + num_spans + 1], most))
            bound += num_spans + 1
            if first >= 0:
                places.append(slice(first, first + count))
            else:
                places.append(flat.rows[row : row + count])
                row += count
        is_first = not calls
        assert is_first or window is None, "a window may not end within a shared segment"
        keys, queries = spans
        args = VarlenArgs(queries=queries, keys=keys, causal=is_first, window=window, scale=scale)
        calls.append(KernelCall(args, *places))
    return calls


def attend_forward(
    kernel: FlashKernel,
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, H_kv, D]
    v: Tensor,  # [T, H_kv, D]
    calls: Sequence[KernelCall],
    sinks: Tensor | None = None,  # [H]
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and its log-sum-exp [H, T]."""
    within_segments, *to_shared = calls
    out, lse = kernel.forward(q, k, v, within_segments.args)
    for args, shared, below in to_shared:
        above, above_lse = kernel.forward(q[below], k[shared], v[shared], args)
        own_lse = lse[:, below]
        merged = torch.logaddexp(own_lse, above_lse)  # [H, O]
        own_share, above_share = (
            (part - merged).exp().t()[:, :, None] for part in (own_lse, above_lse)
        )
        out[below] = (out[below] * own_share + above * above_share).to(out.dtype)
        lse[:, below] = merged
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [H, T] with a further score per head [H], of value 0."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - merged).exp().t()[:, :, None]).to(out.dtype), merged


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:  # [H]
    """`out` and `lse` are those of add_sinks()."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # [H, T]
    return -(share * (grad * out).sum(-1, dtype=lse.dtype).t()).sum(1).to(sinks.dtype)


def attend_backward(
    kernel: FlashKernel, *tensors: Tensor, calls: Sequence[KernelCall]
) -> Gradients:
    """`tensors`: as of FlashKernel.backward, with the results of attend_forward."""
    within_segments, *to_shared = calls
    dq, dk, dv = kernel.backward(*tensors, args=within_segments.args)
    grad, q, k, v, out, lse = tensors
    for args, shared, below in to_shared:
        rows = (grad[below], q[below], k[shared], v[shared], out[below], lse[:, below].contiguous())
        below_dq, shared_dk, shared_dv = kernel.backward(*rows, args=args)
        dq[below] += below_dq
        dk[shared] += shared_dk
        dv[shared] += shared_dv
    return dq, dk, dv


# `flat`: the tensors of FlatCalls.


@torch.library.custom_op("millrace::flash_attention", mutates_args=(), device_types="cuda")
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flat: list[Tensor],
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    calls = calls_of(FlatCalls(*flat), window=window, scale=scale)
    return attend_forward(FlashKernel(), q, k, v, calls, sinks)


@torch.library.custom_op("millrace::flash_attention_backward", mutates_args=(), device_types="cuda")
def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    flat: list[Tensor],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    calls = calls_of(FlatCalls(*flat), window=window, scale=scale)
    return attend_backward(FlashKernel(), grad, q, k, v, out, lse, calls=calls)


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@flash_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, flat, *ctx.args, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, *flat)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, *flat = ctx.saved_tensors
    grads = flash_attention_backward(grad, q, k, v, out, lse, flat, *ctx.args)
    of_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
    return *grads, [None] * len(flat), None, None, of_sinks


flash_attention.register_autograd(_differentiate, setup_context=_save)
