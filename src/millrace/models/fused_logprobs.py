"""Head and token logprobs fused in chunks, for training on many positions.

Promise: the logits of at most `chunk` positions exist at one time, in the forward and the backward
pass; between the two, a few numbers per position are kept. The backward pass recomputes the logits
of a chunk and turns them into their gradient. Gradients of the head accumulate in float32.

Besides the sampled token, logprobs of K given ids per position can be computed, such as the most
likely ids of a teacher, and of all other ids together.

N = positions, V = vocabulary, D = hidden size, K = given ids per position.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.models.logprobs import (
    KeptRows,
    LogitTransform,
    compute_dtype,
    distribution,
    final_logits,
    is_plain,
    multiply,
    output_head,
    project,
    token_logprobs,
)


class FusedLogprobs(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, ...) -> logprobs [N], entropies [N], and
    logprobs of topk_ids and of all other ids [N, K + 1] | None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        kept: KeptRows | None,
        topk_ids: Tensor | None,
        transform: LogitTransform,
        dtype: torch.dtype,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        describe = _compiled(distribution) if compiled else distribution
        factors = (weight.to(dtype), None if bias is None else bias.to(dtype))
        results: list[tuple[Tensor, ...]] = []
        topk_results: list[Tensor] = []
        logits = None
        kept_parts = _split_kept(kept, len(targets), chunk)
        for i, allowed in enumerate(kept_parts):
            rows = slice(i * chunk, (i + 1) * chunk)
            logits = transform.apply(project(hidden[rows].to(dtype), *factors))
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            results.append(describe(logits, targets[rows], temperatures[rows], mask))
            if topk_ids is not None:
                topk_results.append(topk_logprobs(logits, topk_ids[rows], temperatures[rows]))
        logprobs, entropies, normalizers = map(torch.cat, zip(*results, strict=True))
        topk_all = torch.cat(topk_results) if topk_results else None
        ctx.kept, ctx.chunk = kept_parts, chunk
        ctx.transform, ctx.dtype, ctx.compiled = transform, dtype, compiled
        # The logits of a single chunk need not be computed again.
        saved = logits if len(kept_parts) == 1 else None
        known = (targets, temperatures, entropies, normalizers)
        ctx.save_for_backward(hidden, weight, bias, saved, topk_ids, topk_all, *known)
        ctx.set_materialize_grads(False)
        return logprobs, entropies, topk_all

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, saved, topk_ids, topk_all, *known = ctx.saved_tensors
        *sampled_grads, topk_grad = grads
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
            logits = ctx.transform.apply(project(part, *factors)) if saved is None else saved
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            given = (
                None if values is None else values[rows] for values in (*known, *sampled_grads)
            )
            grad = differentiate(logits, mask, *given)
            if topk_grad is not None:
                _, temperatures, _, normalizers = (values[rows] for values in known)
                parts = (topk_ids[rows], topk_all[rows], topk_grad[rows])
                _add_topk_gradient(grad, logits, temperatures, normalizers, *parts)
            grad = ctx.transform.gradient(grad, logits)
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
        return hidden_grad, *grads_of_head, *[None] * 8


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
    """The gradient of the logits [n, V], over the temperature. With p = exp(l), for the logprob of
    t it is [j = t] - p_j; for the entropy H it is -p_j (l_j + H)."""
    logprobs = logits / temperatures[:, None] - normalizers[:, None]
    if allowed is not None:
        logprobs = logprobs.masked_fill(~allowed, -torch.inf)
    probabilities = logprobs.exp()
    slope = torch.zeros_like(normalizers) if logprob_grad is None else logprob_grad
    if entropy_grad is None:
        grad = probabilities * (-slope / temperatures)[:, None]
    else:
        if allowed is not None:
            logprobs = logprobs.masked_fill(~allowed, 0.0)  # 0 * -inf would be NaN
        tilt = entropy_grad[:, None] * (logprobs + entropies[:, None]) + slope[:, None]
        grad = probabilities * tilt / -temperatures[:, None]
    return grad.scatter_add_(1, targets[:, None], (slope / temperatures)[:, None])


def topk_logprobs(
    logits: Tensor,  # [n, V]
    topk_ids: Tensor,  # [n, K]; distinct in each row, K < V
    temperatures: Tensor,  # [n]
) -> Tensor:
    """Logprobs [n, K + 1] of these ids, and of all other ids together."""
    scaled = logits / temperatures[:, None]
    others = scaled.scatter(1, topk_ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([scaled.gather(1, topk_ids), others], 1) - scaled.logsumexp(-1, keepdim=True)


def _add_topk_gradient(
    grad: Tensor,  # [n, V]; changed in place
    logits: Tensor,  # [n, V]
    temperatures: Tensor,  # [n]
    normalizers: Tensor,  # [n]
    topk_ids: Tensor,  # [n, K]
    logprobs: Tensor,  # [n, K + 1]
    slopes: Tensor,  # [n, K + 1]
) -> None:
    """Add the gradient of topk_logprobs, over the temperature. For the logprob of t it is
    [j = t] - p_j; for all other ids it is p_j / (their sum) - p_j, the first term only if j is one
    of them."""
    slopes = slopes / temperatures[:, None]
    scaled = logits / temperatures[:, None] - normalizers[:, None]
    grad -= scaled.exp() * slopes.sum(-1, keepdim=True)
    others = (scaled - logprobs[:, -1:]).exp_().scatter_(1, topk_ids, 0.0)
    grad += others.mul_(slopes[:, -1:])
    grad.scatter_add_(1, topk_ids, slopes[:, :-1])


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
    """Compiled, so that a few kernels replace one pass over [n, V] per operation."""
    return torch.compile(function, dynamic=True)


def chunked_distributions(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    topk_ids: Tensor | None = None,
    temperatures: Tensor,
    kept: KeptRows | None,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """token_logprobs of final_logits of hidden [N, D], and topk_logprobs [N, K + 1] of `topk_ids`
    [N, K], for at most `chunk` positions at a time."""
    assert topk_ids is None or kept is None, "topk_ids may include ids that were not kept"
    head = output_head(model)
    if is_plain(head):
        scalars = (LogitTransform.of(model), compute_dtype(hidden), chunk, compiled)
        return FusedLogprobs.apply(
            hidden, head.weight, head.bias, targets, temperatures, kept, topk_ids, *scalars
        )

    def chunk_outputs(*part: Any) -> tuple[Tensor, ...]:
        hidden, targets, temperatures, kept, topk_ids = part
        logits = final_logits(model, hidden)
        sampled = token_logprobs(logits, targets, temperatures=temperatures, kept=kept)
        if topk_ids is None:
            return sampled
        return *sampled, topk_logprobs(logits, topk_ids, temperatures)

    # Other heads, with an adapter for example: autograd recomputes each chunk.
    kept_parts = _split_kept(kept, len(targets), chunk)
    topk_parts = [None] * len(kept_parts) if topk_ids is None else topk_ids.split(chunk)
    tensors = (x.split(chunk) for x in (hidden, targets, temperatures))
    # The head draws no random numbers, so the generator's state need not be saved.
    outcomes = [
        checkpoint(chunk_outputs, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*tensors, kept_parts, topk_parts, strict=True)
    ]
    logprobs, entropies, *of_topk = (torch.cat(part) for part in zip(*outcomes, strict=True))
    return logprobs, entropies, of_topk[0] if of_topk else None
