"""Exact mode: engines and the trainer compute the same floats, however rows are batched.

A row's result of a matrix product, a reduction or an activation may depend on the rows beside it:
libraries choose other kernels for other shapes. Within this mode, each such function of PyTorch is
replaced by one whose result for a row depends on that row alone. All other functions compute each
element by itself. Attention is exact/attention.py.

Promise: a row of a forward pass gets the same bits in every batch, on both sides, for weights that
are equal in `dtype`. A function that would break this raises ConfigError with its name.

The trainer's float32 weights are rounded to `dtype` wherever they are used, so they are those that
engines received; residual streams are float32 on both sides. Backward passes need not be exact.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from millrace.core.errors import ConfigError
from millrace.models.exact.products import grouped_product, linear, product, refuse

_VECTOR = 64  # a CPU computes elements behind a multiple of this by other code
_SERIAL = 16384  # elements that a CPU computes in one thread

_DTYPE: Any = vars(torch._C.TensorBase)["dtype"].__get__


class ExactMode(TorchFunctionMode):
    """A context of one thread; enter a new one for each pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: in which matrix products get their factors, and weights reach engines."""
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._dtype is not torch.float32:
            if func == _DTYPE and self._is_weight(args[0]):
                return self._dtype
            if func.__class__.__name__ != "method-wrapper":  # reads an attribute such as a shape
                args = tuple(x.to(self._dtype) if self._is_weight(x) else x for x in args)
        exact: Any = _EXACT.get(func, func)
        return exact(*args, **(kwargs or {}))

    def _is_weight(self, x: Any) -> bool:
        return isinstance(x, nn.Parameter) and x.dtype is not self._dtype and x.is_floating_point()


def check_exact(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a dtype in which the kernels of this device are not exact."""
    needed = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype is not needed:
        raise ConfigError(
            f"fidelity.mode = 'exact' needs engine.dtype and trainer.dtype"
            f" {str(needed).removeprefix('torch.')!r} on {device.type!r}, not"
            f" {str(dtype).removeprefix('torch.')!r}; set them to 'auto'."
        )


def _embedding(ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.embedding(ids, weight, *args, **kwargs).float()


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For functions that a CPU computes by other code behind the last whole vector, and at the
    borders of threads."""

    @functools.wraps(function)
    def exact(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.is_cuda:
            return function(x, *args, **kwargs)
        flat = F.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
        parts = [function(part, *args, **kwargs) for part in flat.split(_SERIAL)]
        return torch.cat(parts)[: x.numel()].view(x.shape)

    return exact


def _over_rows(name: str) -> Callable[..., Tensor]:
    """A reduction of the last dimension."""

    def exact(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        if dim not in (-1, [-1], (-1,), x.ndim - 1):
            refuse(name)
        if x.is_cuda:
            from millrace.models.exact import row_kernels

            return row_kernels.reduce(name, x, keepdim=keepdim, **kwargs)
        if x.numel() > x.shape[-1]:
            return getattr(torch, name)(x, -1, keepdim=keepdim, **kwargs)
        # Several threads would share a row that is alone.
        both = torch.cat([x.reshape(1, -1)] * 2)
        shape = x[..., :1].shape if keepdim else x.shape[:-1]
        return getattr(torch, name)(both, -1, **kwargs)[:1].view(shape)

    return exact


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b) if a.shape[-1] == 1 else refuse("matmul")


def _table() -> dict[Any, Callable[..., Any]]:
    internal: Any = getattr(torch._C, "_nn")  # noqa: B009 - no type stub has it
    table: dict[Any, Callable[..., Any]] = {F.linear: linear, F.embedding: _embedding}
    table |= dict.fromkeys((torch.mm, Tensor.mm), product)
    for home in (F, torch):
        for name in ("grouped_mm", "_grouped_mm"):
            if hasattr(home, name):
                table[getattr(home, name)] = grouped_product
    for name in ("silu", "gelu", "sigmoid", "softplus", "logsigmoid", "elu", "mish"):
        for home in (F, torch, Tensor, internal):
            if (function := getattr(home, name, None)) is not None:
                table[function] = _elementwise(function)
    for name in ("logsumexp", "mean"):
        table |= dict.fromkeys((getattr(torch, name), getattr(Tensor, name)), _over_rows(name))
    products = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
    table |= dict.fromkeys(products, _matmul)
    for name in ("bmm", "baddbmm", "addmm", "einsum", "conv1d", "cumprod"):
        for home in (torch, Tensor):
            if hasattr(home, name):
                table[getattr(home, name)] = functools.partial(refuse, name)
    return table


_EXACT = _table()
