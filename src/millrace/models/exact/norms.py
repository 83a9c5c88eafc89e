"""RMS norms of a model, whatever their class, and their exact version on CUDA.

Model code computes an RMS norm in seven operations, each a pass over memory. A module is one if its
output for random input shows that it computes exactly this norm. D = size of the normed dimension.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

_PROBE_ROWS = 3
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in models


class RmsNorm(NamedTuple):
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last dimension."""

    module: nn.Module
    epsilon: float
    offset: float  # some models store the gain minus one


def find_norms(model: nn.Module) -> Iterator[RmsNorm]:
    for module in model.modules():
        if (epsilon := _epsilon(module)) is None:
            continue
        for offset in (0.0, 1.0):
            if _computes_norm(module, epsilon=epsilon, offset=offset):
                yield RmsNorm(module, epsilon, offset)
                break


def use_exact_norms(model: nn.Module) -> None:
    """Replace the norms of a model on CUDA by kernels of one program per row."""
    for norm in [*find_norms(model)]:
        norm.module.forward = functools.partial(_exact_norm, norm)


def _exact_norm(norm: RmsNorm, x: Tensor) -> Tensor:
    from millrace.models.exact import row_kernels

    gain: Any = norm.module.weight
    return row_kernels.Norm.apply(x, gain.to(torch.bfloat16), norm.epsilon, norm.offset)


def _epsilon(module: nn.Module) -> float | None:
    """The module's epsilon; None if it cannot be a norm with a gain."""
    weight = getattr(module, "weight", None)
    names = [name for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    is_gain = isinstance(weight, nn.Parameter) and weight.ndim == 1
    alone = is_gain and len(list(module.parameters())) == 1
    alone = alone and len(inspect.signature(type(module).forward).parameters) == 2  # no gate
    return float(getattr(module, names[0])) if alone and names else None


def _computes_norm(module: nn.Module, *, epsilon: float, offset: float) -> bool:
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    *x, gain = torch.randn(_PROBE_ROWS + 1, len(weight), generator=generator).to(weight.device)
    x, gain = torch.stack(x), gain.to(weight.dtype)
    x = torch.cat([x, x * epsilon**0.5])  # ordinary, and so small that epsilon dominates
    with torch.no_grad():
        theirs = functional_call(module, {"weight": gain}, (x,))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        ours = x * scale * (gain.float() + offset)
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours, rtol=1e-5, atol=1e-6)
