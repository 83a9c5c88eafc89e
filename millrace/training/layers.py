"""How the decoder layers of a model run in training: compiled, or computed twice to save memory.

Both replace the layers' forward functions, so parameters keep their names.
"""

import functools
import os
import shutil

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.core.errors import ConfigError
from millrace.models.fused_norm import fuse_norms
from millrace.training.experts import arrange_experts
from millrace.training.technique import Technique


def arrange_layers(model: PreTrainedModel, technique: Technique) -> None:
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
