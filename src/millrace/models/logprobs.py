"""The language-model head and token logprobs, computed in the same way for engines and trainer.

Promise: both compute the same number: the logprob of a token in the distribution it was sampled
from, after temperature and renormalised to the ids that top-k and top-p kept. Logits are float32:
on CUDA, half-precision factors give products that are never rounded to half precision.

N = positions, V = vocabulary, D = hidden size, K = kept ids of all positions together.
"""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRows:
    """Kept ids as CSR: row i is ids[offsets[i]:offsets[i + 1]]; an empty row keeps all ids."""

    ids: Tensor  # [K] int64
    offsets: Tensor  # [N + 1] int64

    @classmethod
    def of(cls, kept: Kept, *, device: torch.device) -> "KeptRows":
        """A copy: arrays from the wire are read-only."""
        return cls(
            ids=torch.from_numpy(kept.ids.astype(np.int64)).to(device),
            offsets=torch.from_numpy(kept.offsets.copy()).to(device),
        )

    def split(self, chunk: int) -> list["KeptRows"]:
        """Pieces of at most `chunk` rows, in order."""
        num_rows = len(self.offsets) - 1
        starts = list(range(0, num_rows, chunk))
        bounds = self.offsets[
            torch.tensor([*starts, num_rows], device=self.offsets.device)
        ].tolist()
        return [
            KeptRows(
                ids=self.ids[bounds[i] : bounds[i + 1]],
                offsets=self.offsets[start : start + chunk + 1] - bounds[i],
            )
            for i, start in enumerate(starts)
        ]

    def allowed(self, vocab_size: int) -> Tensor:
        """[N, V] bool; True for ids that could have been sampled."""
        sizes = self.offsets.diff()
        allowed = (sizes == 0)[:, None].repeat(1, vocab_size)
        rows = torch.repeat_interleave(
            torch.arange(len(sizes), device=sizes.device), sizes, output_size=len(self.ids)
        )
        allowed[rows, self.ids] = True
        return allowed


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
        return cls(
            divisor=getattr(config, "logits_scaling", None),
            factor=getattr(config, "logit_scale", None),
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


def is_plain(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the head is a plain linear layer, without an adapter for example."""
    return type(head) is nn.Linear


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
    if not hidden.is_cuda:
        return F.linear(hidden, weight, bias).float()
    products = multiply(hidden, weight.t())
    return products if bias is None else products.add_(bias)


def final_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden [N, D] -> float32 logits [N, V]: the head and its logit transform."""
    head = output_head(model)
    if is_plain(head) and not torch.is_grad_enabled():
        dtype = compute_dtype(hidden)
        bias = None if head.bias is None else head.bias.to(dtype)
        products = project(hidden.to(dtype), head.weight.to(dtype), bias)
    else:
        products = head(hidden).float()
    return LogitTransform.of(model).apply(products)


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperatures: Tensor, kept: KeptRows | None
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` [N] and entropies [N] of the distributions they were sampled from.

    logits [N, V] float32, temperatures [N] above 0: a greedy token has no distribution, so its
    logprob is computed at temperature 1. Differentiable in the logits.
    """
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
