"""Prepares the layers of a model for training: compilation, gradient checkpointing, experts.

Forward functions are replaced and modules are not, so parameters keep their names.

The weights of a layer's experts lie in one tensor and are multiplied group by group. Autocast does
not cover that grouped product: experts would compute in float32 and take most of a step, so their
weights are cast here. torch.compile cannot know how many tokens each expert gets, so experts are
not compiled.
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
from millrace.training.optimizer import TrainSettings


def prepare_layers(model: PreTrainedModel, settings: TrainSettings) -> None:
    prepare_experts(model)
    if settings.compile_layers:
        compile_layers(model)
    elif model.device.type == "cpu":
        fuse_norms(model)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each class of layer once, for microbatches of any size.

    Compiling the whole model would take longer by a factor of its number of layers.
    """
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError(
            "trainer.compile = true needs a C++ compiler, and g++ was not found; install it, or set"
            " trainer.compile to false."
        )
    layers = decoder_layers(model)
    compiled = {
        kind: torch.compile(kind.forward, dynamic=True, backend=backend)
        for kind in {type(layer) for layer in layers}
    }
    for layer in layers:
        layer.forward = functools.partial(compiled[type(layer)], layer)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of each layer for the backward pass and recompute the rest.

    transformers' own gradient checkpointing needs train mode, and the model stays in eval mode.
    """
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def prepare_experts(model: PreTrainedModel) -> None:
    for module in model.modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            module.forward = MethodType(_forward, module)


@torch.compiler.disable
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device = next(module.parameters()).device.type
    # The grouped product supports bfloat16. Its float16 support is unsure, so that stays float32.
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
        module = _in_bfloat16(module)
    return type(module).forward(module, *args, **kwargs)


def _in_bfloat16(module: nn.Module) -> nn.Module:
    """A copy of the module with cast weights; gradients reach the original weights."""
    copied = copy.copy(module)
    weights = {name: weight.bfloat16() for name, weight in module.named_parameters(recurse=False)}
    vars(copied)["_parameters"] = weights
    return copied
