"""Fused RMS norms for training on CPUs.

Model code computes an RMS norm in seven operations, each a pass over memory, and as many in the
backward pass; in small models that is a fifth of a step. fuse_norms replaces the forward function
of modules whose output shows that they compute exactly this norm.

Promise: a module that computes anything else is unchanged.

D = size of the normed dimension.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

_PROBE_ROWS = 3
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in models


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
                    _forward, module, module.forward, epsilon, offset
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


def _forward(module: nn.Module, original: Any, epsilon: float, offset: float, x: Tensor) -> Tensor:
    gain: Any = module.weight
    if x.dtype != torch.float32 or gain.dtype != torch.float32:
        return original(x)  # rounds as the model does
    return _Norm.apply(x, gain + offset if offset else gain, epsilon)
