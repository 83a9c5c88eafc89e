"""The language-model head and token logprobs, computed in the same way for engines and trainer.

Promise: both compute the same number: the logprob of a token in the distribution it was sampled
from, after temperature and renormalised to the ids that top-k and top-p kept. Logits are float32:
on CUDA, half-precision factors give products that are never rounded to half precision.

Training on many positions fuses both in chunks: the logits of at most `chunk` positions exist at
one time, in the forward and the backward pass; between the two, a few numbers per position are
kept. The backward pass recomputes the logits of a chunk and turns them into their gradient.
Gradients of the head accumulate in float32. Besides the sampled token, logprobs of K given ids per
position can be computed, such as the most likely ids of a teacher, and of all other ids together.

N = positions, V = vocabulary, D = hidden size, K = given ids per position.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.models.kept_rows import KeptRows
from millrace.models.sharding import local_part

_PRODUCT_SIZE = 2**26  # float32 numbers of a part of the head's gradient, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitTransform:
    """What some models apply to the products of the head: scaling and soft-capping."""

    divisor: float | None
    factor: float | None
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LogitTransform":
        # Which of these exist depends on the architecture; load_model checks the resulting logits.
        config = model.config.get_text_config()
        scaling = getattr(config, "logits_scaling", None)
        names = ("logit_scale", "lm_head_multiplier")  # of Cohere, and of Falcon-H1
        factors = [getattr(config, name, None) for name in names]
        if config.model_type == "hyperclovax":  # multiplies where Granite divides
            factors, scaling = [scaling], None
        return cls(
            divisor=scaling,
            factor=next((factor for factor in factors if factor is not None), None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def apply(self, products: Tensor) -> Tensor:
        if self.divisor is not None:
            products = products / self.divisor
        if self.factor is not None:
            products = products * self.factor
        if self.softcap is not None:
            products = torch.tanh(products / self.softcap) * self.softcap
        return products

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the products from that of the logits; changes `grad` in place."""
        if self.softcap is not None:
            grad *= 1 - (logits / self.softcap).square_()
        if self.factor is not None:
            grad *= self.factor
        if self.divisor is not None:
            grad /= self.divisor
        return grad


def output_head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert head is not None, "load_model refuses models without a head"
    return head


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which the head multiplies: that of autocast if it is enabled."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32; not differentiable on CUDA in half precision."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 products [N, V] of hidden [N, D] and a head of the same dtype. Not differentiable."""
    if not hidden.is_cuda:  # where products of 16-bit factors would be rounded, as autocast does
        factors = (hidden.float(), weight.float(), None if bias is None else bias.float())
        with torch.autocast("cpu", enabled=False):
            return F.linear(*factors)
    products = multiply(hidden, weight.t())
    return products if bias is None else products.add_(bias)


def final_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden [N, D] -> float32 logits [N, V]: the head and its logit transform."""
    head = output_head(model)
    is_fast = not torch.is_grad_enabled()
    if is_fast and type(head) is nn.Linear and not isinstance(head.weight, DTensor):
        dtype = compute_dtype(hidden)
        bias = None if head.bias is None else head.bias.to(dtype)
        products = project(hidden.to(dtype), head.weight.to(dtype), bias)
    else:
        products = head(hidden).float()
    return LogitTransform.of(model).apply(products)


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperatures: Tensor, kept: KeptRows | None
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` [N] and entropies [N] of the distributions they were sampled from;
    differentiable in the logits [N, V] float32. Temperatures [N] are above 0: a greedy token has no
    distribution, so its logprob is computed at temperature 1."""
    allowed = None if kept is None else kept.allowed(logits.shape[-1])
    logprobs, entropies, _ = distribution(logits, targets, temperatures, allowed)
    return logprobs, entropies


def distribution(
    logits: Tensor, targets: Tensor, temperatures: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and normalizers [N]; `allowed` [N, V] bool marks the kept ids."""
    scaled = logits / temperatures[:, None]
    finite = scaled
    if allowed is not None:
        finite = scaled.masked_fill(~allowed, 0.0)
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    normalizers = scaled.logsumexp(-1)  # [N]
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - normalizers
    # H = log Z - E[z]; for masked ids 0 * -inf would be NaN, so their logits are set to 0.
    probabilities = (scaled - normalizers[:, None]).exp()
    entropies = normalizers - (probabilities * finite).sum(-1)
    return logprobs, entropies, normalizers


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
        group: Any,  # ranks that share the vocabulary, each with its rows of the head; or None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        describe = _compiled(distribution) if compiled else distribution
        factors = (weight.to(dtype), None if bias is None else bias.to(dtype))
        results: list[tuple[Tensor, ...]] = []
        topk_results: list[Tensor] = []
        logits = None
        kept_parts = _split_kept(kept, len(targets), chunk)
        for i, allowed in enumerate(kept_parts):
            rows = slice(i * chunk, (i + 1) * chunk)
            products = project(hidden[rows].to(dtype), *factors)
            logits = transform.apply(_of_all_ranks(products, group))
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            results.append(
                describe(logits, _copied(targets, rows), _copied(temperatures, rows), mask)
            )
            if topk_ids is not None:
                topk_results.append(topk_logprobs(logits, topk_ids[rows], temperatures[rows]))
        logprobs, entropies, normalizers = map(torch.cat, zip(*results, strict=True))
        topk_all = torch.cat(topk_results) if topk_results else None
        ctx.kept, ctx.chunk = kept_parts, chunk
        ctx.transform, ctx.dtype, ctx.compiled, ctx.group = transform, dtype, compiled, group
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
            logits = saved
            if logits is None:
                logits = ctx.transform.apply(_of_all_ranks(project(part, *factors), ctx.group))
            mask = None if allowed is None else allowed.allowed(logits.shape[-1])
            given = (None if x is None else _copied(x, rows) for x in (*known, *sampled_grads))
            grad = differentiate(logits, mask, *given)
            if topk_grad is not None:
                _, temperatures, _, normalizers = (values[rows] for values in known)
                parts = (topk_ids[rows], topk_all[rows], topk_grad[rows])
                _add_topk_gradient(grad, logits, temperatures, normalizers, *parts)
            grad = _of_own_rank(ctx.transform.gradient(grad, logits), ctx.group)
            if bias_grad is not None:
                bias_grad += grad.sum(0)
            grad = grad.to(ctx.dtype)
            if weight_grad is not None and ctx.dtype == torch.float32:
                weight_grad.addmm_(grad.t(), part)
            elif weight_grad is not None:
                _add_product(weight_grad, grad, part)
            if hidden_grad is not None:
                hidden_grad[rows] = torch.mm(grad, factors[0])
        if hidden_grad is not None and ctx.group is not None:
            dist.all_reduce(hidden_grad, group=ctx.group)
        of_head = (None if g is None else g.to(weight.dtype) for g in (weight_grad, bias_grad))
        return hidden_grad, *of_head, *[None] * 9


def _copied(values: Tensor, rows: slice) -> Tensor:
    """A copy, because torch.compile builds another program for a view of other rows."""
    return values[rows].clone()


def _add_product(total: Tensor, grad: Tensor, part: Tensor) -> None:
    """total [V, D] += grad [n, V] transposed, times part [n, D]; by rows, because a whole product
    would be as large as the head."""
    num_rows = max(1, _PRODUCT_SIZE // total.shape[1])
    for rows, columns in zip(total.split(num_rows), grad.split(num_rows, 1), strict=True):
        rows.add_(multiply(columns.t(), part))


def _of_all_ranks(products: Tensor, group: Any) -> Tensor:
    """Products [n, V] with the vocabulary, from each rank's part of them."""
    if group is None:
        return products
    parts = [torch.empty_like(products) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, products, group=group)
    return torch.cat(parts, 1)


def _of_own_rank(grad: Tensor, group: Any) -> Tensor:
    """This rank's part of the gradient [n, V] of all products."""
    if group is None:
        return grad
    return grad.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


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
    """Add the gradient of topk_logprobs, over the temperature: [j = t] - p_j for the logprob of t,
    and p_j / (their sum) - p_j for all other ids, the first term only if j is one of them."""
    slopes = slopes / temperatures[:, None]
    scaled = logits / temperatures[:, None] - normalizers[:, None]
    grad -= scaled.exp() * slopes.sum(-1, keepdim=True)
    others = (scaled - logprobs[:, -1:]).exp_().scatter_(1, topk_ids, 0.0)
    grad += others.mul_(slopes[:, -1:])
    grad.scatter_add_(1, topk_ids, slopes[:, :-1])


def _split_kept(kept: KeptRows | None, num_rows: int, chunk: int) -> list[KeptRows | None]:
    """One entry per chunk."""
    if kept is None or num_rows == 0:
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
    if type(head) is nn.Linear:
        weight, bias, group = head.weight, head.bias, None
        if isinstance(weight, DTensor):  # of tensor parallelism
            group = weight.device_mesh.get_group()
            weight, bias = weight.to_local(), None if bias is None else local_part(bias)
        scalars = (LogitTransform.of(model), compute_dtype(hidden), chunk, compiled, group)
        tensors = (hidden, weight, bias, targets, temperatures)
        return FusedLogprobs.apply(*tensors, kept, topk_ids, *scalars)

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
