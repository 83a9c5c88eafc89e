"""How the decoder layers of a model run in training: compiled, or computed twice to save memory.

Both replace the layers' forward functions, so parameters keep their names.

Experts in training: what autocast and torch.compile do for other layers, done for them.

The weights of a layer's experts lie side by side in one tensor and are multiplied group by group.
Autocast does not know that product: left alone, experts would compute in float32 and take most of a
step. And torch.compile cannot know how many tokens each of them gets, so they stay out of it.
"""

import copy
import functools
import os
import shutil
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.core.errors import ConfigError
from millrace.models.fused_norm import fuse_norms
from millrace.training.settings import TrainSettings


def arrange_layers(model: PreTrainedModel, technique: TrainSettings) -> None:
    arrange_experts(model)
    if technique.compile_layers:
        compile_layers(model)
    elif model.device.type == "cpu":
        fuse_norms(model)
    if technique.gradient_checkpointing:
        checkpoint_layers(model)


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each kind of layer once, for microbatches of any size; all of a kind share it.

    The whole model in one piece would take as many times longer to compile as it has layers.
    """
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError(
            "trainer.compile = true needs a C++ compiler, and g++ is not to be found; install it or"
            " set trainer.compile to false."
        )
    layers = decoder_layers(model)
    compiled = {
        kind: torch.compile(kind.forward, dynamic=True, backend=backend)
        for kind in {type(layer) for layer in layers}
    }
    for layer in layers:
        layer.forward = functools.partial(compiled[type(layer)], layer)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of each layer for the backward pass, and compute the rest again.

    transformers' own switch works in train mode only, and the model stays in eval mode.
    """
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


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
