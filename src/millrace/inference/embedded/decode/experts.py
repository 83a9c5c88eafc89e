"""Experts of a mixture on CUDA: kernels of their own for few rows, grouped products for many.

One opaque operator decides by the number of rows, so that compiled layers serve both.

T = rows of the pass, I = input size of an expert.
"""

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from millrace.inference.embedded.decode.attention import define_operator
from millrace.models.lora import factors

_TILE = 64  # sizes of experts that their kernels compute are multiples of it


def use_expert_kernels(model: PreTrainedModel) -> None:
    """Make experts that the kernels can compute use them."""
    for module in factors.expert_modules(model).values():
        if can_use_kernels(module):
            # One function for all layers: torch.compile would build a program for each closure.
            module.forward = MethodType(_experts_forward, module)


def can_use_kernels(module: Any) -> bool:
    own = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
    if own != dict.fromkeys(factors.EXPERT_WEIGHTS, 3) or factors.is_transposed(module):
        return False
    gate = getattr(module, "_apply_gate", None)
    is_default = getattr(gate, "__module__", "") == "transformers.integrations.moe"
    is_silu = isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
    if not is_default or not is_silu or getattr(module, "has_post_expert_norm", False):
        return False
    weight = module.down_proj
    return weight.dtype != torch.float32 and not any(n % _TILE for n in weight.shape[1:])


def _experts_forward(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    matrices = (module.gate_up_proj, module.down_proj)
    return torch.ops.millrace.experts(hidden, indices, weights, *matrices)


def _experts_on_cuda(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    from millrace.inference.embedded.decode.kernels import expert_kernels

    if indices.numel() <= expert_kernels.MAX_ROWS:
        return expert_kernels.experts(hidden, indices, weights, gate_up, down)
    return plain_experts(hidden, indices, weights, gate_up, down)


def plain_experts(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:  # [T, I]
    """The same by grouped products, on any device."""
    module = SimpleNamespace(
        num_experts=len(down),
        gate_up_proj=gate_up,
        down_proj=down,
        expert_updates={},
        _apply_gate=_gated,
    )
    return factors.forward_with_lora(module, hidden, indices, weights)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


define_operator(
    "experts(Tensor hidden, Tensor indices, Tensor weights, Tensor gate_up, Tensor down) -> Tensor",
    cuda=_experts_on_cuda,
    cpu=plain_experts,
    shape=lambda hidden, *_: torch.empty_like(hidden),
)
