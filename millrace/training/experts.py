"""Experts in training: what autocast and torch.compile do for other layers, done for them.

The weights of a layer's experts lie side by side in one tensor and are multiplied group by group.
Autocast does not know that product: left alone, experts would compute in float32 and take most of a
step. And torch.compile cannot know how many tokens each of them gets, so they stay out of it.
"""

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def arrange_experts(model: PreTrainedModel) -> None:
    for module in model.modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            module.forward = MethodType(_forward, module)


@torch.compiler.disable
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device = next(module.parameters()).device.type
    # The product is there for bfloat16; float16, of which it is not sure, stays float32.
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
        module = _in_bfloat16(module)
    return type(module).forward(module, *args, **kwargs)


def _in_bfloat16(module: nn.Module) -> nn.Module:
    """One that computes the same with copies of its weights; gradients reach the originals."""
    stand_in = copy.copy(module)
    weights = {name: weight.bfloat16() for name, weight in module.named_parameters(recurse=False)}
    vars(stand_in)["_parameters"] = weights
    return stand_in
