"""Heads on hidden states: the language-model head with its logit transforms, and the value head.

Promise: engines and the trainer multiply in the same way: on CUDA, half-precision factors give
float32 products that are never rounded to half precision. Values are float32, whatever the backbone
computes in, and 0 until the value head is trained.

N = positions, V = vocabulary, D = hidden size, T = rows of a forward pass.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


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


def is_plain(head: nn.Module) -> bool:
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


class ValueModel(nn.Module):
    """The backbone of a language model with a value head; its own head is dropped."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        backbone = model.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.backbone = backbone
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, hidden: Tensor) -> Tensor:  # [T, D] -> [T]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.float()).squeeze(-1)
