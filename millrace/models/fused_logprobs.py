"""The head and the token-logprob function in one, for training on many positions.

Promise: the logits of at most `chunk` positions exist at one time, in the forward and the backward
pass, whatever the number of positions; what is kept between the two is a few numbers per position.
The backward pass computes a chunk's logits once more and turns them into their own gradient.
Gradients of the head add up in float32.

N = positions, V = vocabulary, D = hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.models.head import (
    LogitRules,
    compute_dtype,
    is_plain,
    multiply,
    output_head,
    project,
)
from millrace.models.logprobs import KeptRows, distribution, final_logits, token_logprobs


class FusedLogprobs(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, ...) -> logprobs [N], entropies [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        kept: KeptRows | None,
        rules: LogitRules,
        dtype: torch.dtype,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        describe = _compiled(distribution) if compiled else distribution
        factors = (weight.to(dtype), None if bias is None else bias.to(dtype))
        results = []
        logits = None
        kept_parts = _split_kept(kept, len(targets), chunk)
        for i, allowed in enumerate(kept_parts):
            rows = slice(i * chunk, (i + 1) * chunk)
            logits = rules.apply(project(hidden[rows].to(dtype), *factors))
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            results.append(describe(logits, targets[rows], temperatures[rows], mask))
        logprobs, entropies, normalizers = map(torch.cat, zip(*results, strict=True))
        ctx.kept, ctx.chunk = kept_parts, chunk
        ctx.rules, ctx.dtype, ctx.compiled = rules, dtype, compiled
        # The logits of a single chunk need not be computed again.
        saved = logits if len(kept_parts) == 1 else None
        known = (targets, temperatures, entropies, normalizers)
        ctx.save_for_backward(hidden, weight, bias, saved, *known)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, saved, *known = ctx.saved_tensors
        differentiate: Callable[..., Tensor] = _logit_gradient
        if ctx.compiled:
            differentiate = _compiled(_logit_gradient)
        factors = (weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(weight[:, 0], dtype=torch.float32) if wants_bias else None
        for i, allowed in enumerate(ctx.kept):
            rows = slice(i * ctx.chunk, (i + 1) * ctx.chunk)
            part = hidden[rows].to(ctx.dtype)
            logits = ctx.rules.apply(project(part, *factors)) if saved is None else saved
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            given = (None if values is None else values[rows] for values in (*known, *grads))
            grad = ctx.rules.gradient(differentiate(logits, mask, *given), logits)
            if bias_grad is not None:
                bias_grad += grad.sum(0)
            grad = grad.to(ctx.dtype)
            if weight_grad is not None:
                _accumulate(weight_grad, grad.t(), part)
            if hidden_grad is not None:
                hidden_grad[rows] = torch.mm(grad, factors[0])
        grads_of_head = (
            None if g is None else g.to(weight.dtype) for g in (weight_grad, bias_grad)
        )
        return hidden_grad, *grads_of_head, *[None] * 7


def _logit_gradient(
    logits: Tensor,  # [n, V]
    allowed: Tensor | None,  # [n, V] bool
    targets: Tensor,  # [n]
    temperatures: Tensor,  # [n]
    entropies: Tensor,  # [n]
    normalizers: Tensor,  # [n]
    logprob_grad: Tensor | None,  # [n]
    entropy_grad: Tensor | None,  # [n]
) -> Tensor:
    """[n, V]. With p = exp(l), of the logprob of t: [j = t] - p_j; of the entropy H:
    -p_j (l_j + H); both over the temperature."""
    logprobs = logits / temperatures[:, None] - normalizers[:, None]
    if allowed is not None:
        logprobs = logprobs.masked_fill(~allowed, -torch.inf)
    probabilities = logprobs.exp()
    slope = torch.zeros_like(normalizers) if logprob_grad is None else logprob_grad
    if entropy_grad is None:
        grad = probabilities * (-slope / temperatures)[:, None]
    else:
        if allowed is not None:
            logprobs = logprobs.masked_fill(~allowed, 0.0)  # 0 * -inf would be no number
        tilt = entropy_grad[:, None] * (logprobs + entropies[:, None]) + slope[:, None]
        grad = probabilities * tilt / -temperatures[:, None]
    return grad.scatter_add_(1, targets[:, None], (slope / temperatures)[:, None])


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; total is float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += multiply(a, b)


def _split_kept(kept: KeptRows | None, num_rows: int, chunk: int) -> list[KeptRows | None]:
    """One entry per chunk."""
    if kept is None:
        return [None] * max(1, -(-num_rows // chunk))
    return [*kept.split(chunk)]


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel or two, instead of one pass over [n, V] for each operation."""
    return torch.compile(function, dynamic=True)


def chunked_token_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperatures: Tensor,
    kept: KeptRows | None,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """token_logprobs of final_logits of hidden [N, D], for at most `chunk` positions at a time."""
    head = output_head(model)
    if not is_plain(head):
        return _recomputed(model, hidden, targets, temperatures, kept, chunk)
    assert isinstance(head, nn.Linear)
    return FusedLogprobs.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        temperatures,
        kept,
        LogitRules.of(model),
        compute_dtype(hidden),
        chunk,
        compiled,
    )


def _recomputed(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    kept: KeptRows | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The same for heads with parts of their own: autograd runs each chunk twice."""

    def of_chunk(
        hidden: Tensor, targets: Tensor, temperatures: Tensor, kept: KeptRows | None
    ) -> tuple[Tensor, Tensor]:
        logits = final_logits(model, hidden)
        return token_logprobs(logits, targets, temperatures=temperatures, kept=kept)

    parts = zip(
        hidden.split(chunk),
        targets.split(chunk),
        temperatures.split(chunk),
        _split_kept(kept, len(targets), chunk),
        strict=True,
    )
    # The head draws no random numbers, so there is no generator state worth saving.
    outcomes = [
        checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts
    ]
    logprobs, entropies = zip(*outcomes, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
