"""Prepares the layers of a model for training: compilation, checkpointing, experts, routers, norms.

Forward functions are replaced and modules are not, so parameters keep their names.

The weights of a layer's experts lie in one tensor and are multiplied group by group. Autocast does
not cover that grouped product: experts would compute in float32 and take most of a step, so their
weights are cast here. torch.compile cannot know how many tokens each expert gets, so experts are
not compiled. Routers compute what those of engines do: float32 products of weights that came in 16
bits. Autocast would round the scores.

Model code computes an RMS norm in seven operations, each a pass over memory, and as many in the
backward pass: on CPUs a fifth of a step. fuse_norms replaces them, on GPUs those in 16 bits.
D = size of a normed row.
"""

import functools
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.models.exact.mode import ExactMode, find_norms, use_exact_norms
from millrace.models.lora.factors import (
    expert_modules,
    local_forward,
    set_forward,
)
from millrace.models.sharding import decoder_layers, router_modules
from millrace.training.optimizer import TrainSettings


def prepare_layers(model: PreTrainedModel, settings: TrainSettings) -> None:
    prepare_experts(model)
    for router in router_modules(model):
        own: Any = router.forward  # of the class, or with replayed routes
        router.forward = functools.partial(_forward_router, own.__func__, router)
    if settings.compile_layers and not settings.exact:
        compile_layers(model)
    elif settings.exact and model.device.type == "cuda":
        use_exact_norms(model)
    elif model.device.type == "cpu" and not settings.exact:
        fuse_norms(model)
    if settings.gradient_checkpointing:
        checkpoint_layers(model, exact=settings.compute_dtype if settings.exact else None)


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


def checkpoint_layers(
    model: PreTrainedModel,
    *,
    exact: torch.dtype | None = None,
    keeps_all: Callable[[], bool] = lambda: False,
) -> None:
    """Keep only the inputs of layers for the backward pass and recompute the rest, unless
    keeps_all() is true. That of transformers needs train mode; the model stays in eval mode.
    `exact`: dtype of exact mode."""

    def contexts() -> tuple[Any, Any]:  # of the forward pass, and of computing it again
        return nullcontext(), nullcontext() if exact is None else ExactMode(exact)

    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        if keeps_all():
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    for layer in decoder_layers(model):
        layer.forward = functools.partial(forward, layer.forward)


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
        weights = {name: w.to(dtype) for name, w in module.named_parameters(recurse=False)}
        module = _with_weights(module, weights)
    return function(module, *args, **kwargs)


@torch.compiler.disable  # experts, which come next, are not compiled either
def _forward_router(function: Any, module: nn.Module, hidden: Tensor, *args: Any) -> Any:
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return function(module, hidden, *args)
    dtype = torch.get_autocast_dtype(device)
    # The gradient of the rounding is 1, so that it is not rounded itself.
    weights = {
        name: w + (w.to(dtype).float() - w).detach()
        for name, w in module.named_parameters(recurse=False)
    }
    with torch.autocast(device, enabled=False):
        return function(_with_weights(module, weights), hidden.float(), *args)


def _with_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a module with weights made of its own, which get the gradients."""
    # copy.copy() would initialize a unit of FSDP again.
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    vars(copied)["_parameters"] = {**vars(module)["_parameters"], **weights}
    return copied


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
    norms = [*find_norms(model)]
    for module, epsilon, offset in norms:
        rounds_first = not offset and _rounds_first(module, epsilon)
        module.forward = functools.partial(
            _forward_norm, module, module.forward, epsilon, offset, rounds_first
        )
    return len(norms)


def _forward_norm(
    module: nn.Module, original: Any, epsilon: float, offset: float, rounds_first: bool, x: Tensor
) -> Tensor:
    gain: Any = module.weight
    if rounds_first and x.is_cuda and x.dtype == gain.dtype != torch.float32:
        return _half_norm(x, gain, epsilon)
    if x.dtype != torch.float32 or gain.dtype != torch.float32:
        return original(x)  # rounds as the model does
    return _Norm.apply(x, gain + offset if offset else gain, epsilon)


def _half_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """In 16 bits, rounded before the gain and after it, as in Llama and Qwen."""
    return gain * F.rms_norm(x, x.shape[-1:], eps=epsilon)


def _rounds_first(module: nn.Module, epsilon: float) -> bool:
    """Whether the module computes _half_norm(), apart from the order of a sum."""
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    *rows, gain = torch.randn(17, len(weight), generator=generator).to(weight.device).bfloat16()
    x = torch.stack(rows)
    with torch.no_grad():
        theirs = functional_call(module, {"weight": gain}, (x,))
        ours = _half_norm(x, gain, epsilon)
    return theirs.dtype == ours.dtype and bool((theirs == ours).float().mean() > 0.98)
