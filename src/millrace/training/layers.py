"""Prepares the layers of a model for training: compilation, checkpointing, experts, RMS norms.

Forward functions are replaced and modules are not, so parameters keep their names.

The weights of a layer's experts lie in one tensor and are multiplied group by group. Autocast does
not cover that grouped product: experts would compute in float32 and take most of a step, so their
weights are cast here. torch.compile cannot know how many tokens each expert gets, so experts are
not compiled.

Model code computes an RMS norm in seven operations, each a pass over memory, and as many in the
backward pass; on CPUs and in small models that is a fifth of a step. fuse_norms replaces the
forward function of modules whose output shows that they compute exactly this norm.
D = size of the normed dimension.
"""

import functools
import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.models.lora.experts import expert_modules, local_forward, set_forward
from millrace.models.sharding import decoder_layers
from millrace.training.optimizer import TrainSettings

_PROBE_ROWS = 3
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in models


def prepare_layers(model: PreTrainedModel, settings: TrainSettings) -> None:
    prepare_experts(model)
    if settings.compile_layers:
        compile_layers(model)
    elif model.device.type == "cpu":
        fuse_norms(model)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each class of layer once, for microbatches of any size. Compiling the whole model
    would take longer by a factor of its number of layers."""
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
    """Keep only the inputs of each layer for the backward pass and recompute the rest. That of
    transformers needs train mode, and the model stays in eval mode."""
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def prepare_experts(model: PreTrainedModel) -> None:
    for module in expert_modules(model).values():
        own = local_forward(module)  # of the class, or of an adapter
        set_forward(module, functools.partial(_forward_experts, own.__func__, module))


@torch.compiler.disable
def _forward_experts(function: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device = next(module.parameters()).device.type
    if torch.is_autocast_enabled(device):
        # The grouped product supports bfloat16. Its float16 support is unsure: that is float32.
        is_bfloat16 = torch.get_autocast_dtype(device) is torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        # A copy of the module has the cast weights; gradients reach the original weights.
        weights = {name: w.to(dtype) for name, w in module.named_parameters(recurse=False)}
        # Not by copy.copy(): a unit of FSDP would be initialized again.
        copied = object.__new__(type(module))
        vars(copied).update({**vars(module), "_parameters": weights})
        module = copied
    return function(module, *args, **kwargs)


class _Norm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, gain)
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        normed, scale, gain = ctx.saved_tensors
        aligned = (grad * normed).flatten(0, -2)  # [rows, D]
        gain_grad = aligned.sum(0) if ctx.needs_input_grad[1] else None
        # The gradient along x vanishes: scaling x does not change the output.
        along = torch.mv(aligned, gain).div_(-aligned.shape[-1]).view_as(scale)
        x_grad = torch.addcmul(grad * gain, normed, along).mul_(scale)
        return x_grad, gain_grad, None


def fuse_norms(model: nn.Module) -> int:
    """Fuse all RMS norms of a model; returns their number."""
    num_fused = 0
    for module in model.modules():
        if (epsilon := _epsilon(module)) is None:
            continue
        for offset in (0.0, 1.0):  # some models store the gain minus one
            if _computes_norm(module, epsilon=epsilon, offset=offset):
                module.forward = functools.partial(
                    _forward_norm, module, module.forward, epsilon, offset
                )
                num_fused += 1
                break
    return num_fused


def _epsilon(module: nn.Module) -> float | None:
    """The module's epsilon; None if it cannot be a norm with a gain."""
    weight = getattr(module, "weight", None)
    names = [name for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    is_gain = isinstance(weight, nn.Parameter) and weight.ndim == 1
    alone = is_gain and len(list(module.parameters())) == 1
    return float(getattr(module, names[0])) if alone and names else None


def _computes_norm(module: nn.Module, *, epsilon: float, offset: float) -> bool:
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    *x, gain = torch.randn(_PROBE_ROWS + 1, len(weight), generator=generator).to(weight.device)
    x = torch.stack(x)
    x = torch.cat([x, x * epsilon**0.5])  # ordinary, and so small that epsilon dominates
    with torch.no_grad():
        theirs = functional_call(module, {"weight": gain.to(weight.dtype)}, (x,))
        ours = _Norm.apply(x, gain + offset, epsilon)
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6)


def _forward_norm(
    module: nn.Module, original: Any, epsilon: float, offset: float, x: Tensor
) -> Tensor:
    gain: Any = module.weight
    if x.dtype != torch.float32 or gain.dtype != torch.float32:
        return original(x)  # rounds as the model does
    return _Norm.apply(x, gain + offset if offset else gain, epsilon)
