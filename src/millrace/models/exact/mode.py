"""Exact mode: engines and the trainer compute the same floats, however rows are batched.

A row's result of a matrix product, a reduction or an activation may depend on the rows beside it:
libraries choose other kernels for other shapes. Within this mode, each such function of PyTorch is
replaced by one whose result for a row depends on that row alone, or refused by a ConfigError with
its name. tests/models/test_exact_functions.py looks for such functions. Attention is
exact/attention.py.

Promise: a row of a forward pass gets the same bits in every batch, on both sides, for weights that
are equal in `dtype`, unless the model itself combines rows, which the self-test of a model finds.

The trainer's float32 weights are rounded to `dtype` wherever they are used, so they are those that
engines received; residual streams are float32 on both sides. Backward passes need not be exact.

On a CPU, rows are multiplied in tiles of a constant number, so the library uses one kernel for each
weight. On CUDA, one Triton kernel adds in the same order for every number of rows. A module is an
RMS norm if its output for random input shows that it computes this norm.

T = rows, I and O = input and output size, E = experts.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from millrace.core.errors import ConfigError

# Measured: with more rows or a larger inner dimension, threads may share the sum of a product.
_TILE = 16  # rows
_INNER = 256
_VECTOR = 64  # a CPU computes elements behind a multiple of this by other code
_SERIAL = 16384  # elements that a CPU computes in one thread
_PLAIN_POWERS = (2, 3, 0.5, -0.5, -1, -2)  # which a CPU computes by products and roots

_ELEMENTWISE = (
    *("silu", "gelu", "sigmoid", "expit", "softplus", "logsigmoid", "elu", "celu", "selu", "mish"),
    *("exp2", "sinh", "cosh", "atanh", "arctanh", "pow", "float_power", "ldexp"),
    *("atan2", "arctan2", "logaddexp", "logaddexp2", "igamma", "igammac", "gammainc", "gammaincc"),
)
_REFUSED = (
    *("bmm", "baddbmm", "addbmm", "addmm", "addmv", "mv", "dot", "vdot", "inner", "vecdot"),
    *("einsum", "tensordot", "multi_dot", "chain_matmul", "bilinear", "cdist", "cumprod"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
)
_PROBE_ROWS = 3  # of a module that may be a norm
_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attribute names in models

_DTYPE: Any = vars(torch._C.TensorBase)["dtype"].__get__


def refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    """Refuse a model for a function or a part that has no exact version."""
    raise ConfigError(
        f"fidelity.mode = 'exact' does not support this model, which uses {name!r}: its result for"
        " a token may depend on the tokens beside it; set fidelity.mode to 'fast'."
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times the transposed weight [O, I]; in the dtype of the weight."""
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() or not x.is_cuda:  # otherwise the kernel rounds it
        rows = rows.to(weight.dtype)
    output = _Product.apply(rows, weight, weight.dtype).view(*x.shape[:-1], len(weight))
    return output if bias is None else output + bias


def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """a [T, I] times b [I, O], which is a transposed weight."""
    return _Product.apply(a, b.t(), out_dtype or a.dtype)


def grouped_product(x: Tensor, weight: Tensor, *, offs: Tensor, **_: None) -> Tensor:
    """x [T, I] times the weight [E, I, O] of each row's expert; `offs` [E]: ends of their rows."""
    if x.is_cuda:
        return _GroupedProduct.apply(x, weight, offs)
    ends = offs.tolist()
    parts = [
        _Product.apply(x[start:end], weight[expert].t(), x.dtype)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        if end > start
    ]
    return torch.cat(parts) if parts else x.new_empty(0, weight.shape[2])


class _Product(torch.autograd.Function):
    """(x [T, I], weight [O, I]) -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            from millrace.models.exact import exact_kernels

            return exact_kernels.product(x, weight, dtype=dtype)
        return _in_tiles(x.float(), weight.float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


def _in_tiles(x: Tensor, weight: Tensor) -> Tensor:
    if len(weight) == 1:  # a product with a vector has a kernel for each number of rows
        return _in_tiles(x, F.pad(weight, (0, 0, 0, 1)))[:, :1]
    num_tiles = -(-len(x) // _TILE)
    tiles = F.pad(x, (0, 0, 0, num_tiles * _TILE - len(x))).view(num_tiles, _TILE, -1)
    parts = zip(tiles.split(_INNER, 2), weight.t().split(_INNER), strict=True)
    total: Any = 0
    for part, factor in parts:
        total = total + torch.bmm(part, factor.expand(num_tiles, -1, -1))
    return total.flatten(0, 1)[: len(x)]


class _GroupedProduct(torch.autograd.Function):
    """(x [T, I], weight [E, I, O], ends [E]) -> [T, O], on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        from millrace.models.exact import exact_kernels

        ctx.save_for_backward(x, weight, ends)
        return exact_kernels.grouped(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, weight.transpose(1, 2), offs=ends)
        if ctx.needs_input_grad[1]:
            of_weight = F.grouped_mm(x.t(), grad, offs=ends)
        return of_x, of_weight, None


class ExactMode(TorchFunctionMode):
    """A context of one thread; enter a new one for each pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: in which matrix products get their factors, and weights reach engines."""
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that a CPU computes by other code behind the last whole vector, and at the
    borders of threads. Tensor arguments are broadcast."""

    @functools.wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if tensors[0].is_cuda or _is_plain_power(function, *args[1:], **kwargs):
            return function(*args, **kwargs)
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        size = shape.numel()

        def parts(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return itertools.repeat(x)
            return F.pad(x.expand(shape).reshape(-1), (0, -size % _VECTOR)).split(_SERIAL)

        found = [function(*part, **kwargs) for part in zip(*map(parts, args), strict=False)]
        return torch.cat(found)[:size].view(shape)

    return exact


def _is_plain_power(function: Callable[..., Tensor], exponent: Any = None, **_: Any) -> bool:
    is_power = function.__name__ in ("pow", "float_power") and isinstance(exponent, int | float)
    return is_power and exponent in _PLAIN_POWERS


def _over_rows(name: str) -> Callable[..., Tensor]:
    """A reduction of the last dimension."""

    def exact(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        if dim not in (-1, [-1], (-1,), x.ndim - 1):
            refuse(name)
        if x.is_cuda:
            from millrace.models.exact import exact_kernels

            return exact_kernels.reduce(name, x, keepdim=keepdim, **kwargs)
        if x.numel() > x.shape[-1]:
            return getattr(torch, name)(x, -1, keepdim=keepdim, **kwargs)
        # Several threads would share a row that is alone.
        both = torch.cat([x.reshape(1, -1)] * 2)
        shape = x[..., :1].shape if keepdim else x.shape[:-1]
        return getattr(torch, name)(both, -1, **kwargs)[:1].view(shape)

    return exact


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b) if a.shape[-1] == 1 else refuse("matmul")


def _along_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a cumulative function, which may go along the last dimension, not from row to row."""

    def exact(x: Tensor, dim: int, **kwargs: Any) -> Any:
        if x.is_floating_point() and dim not in (-1, x.ndim - 1):
            refuse(function.__name__)
        return function(x, dim, **kwargs)

    return exact


def _of_complex(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a product, whose vector code rounds complex numbers otherwise than the code for the
    elements behind the last whole vector. Real products and sums are rounded in one way."""

    @functools.wraps(function)
    def exact(a: Any, b: Any, **kwargs: Any) -> Tensor:
        if not all(isinstance(x, Tensor) and x.is_complex() for x in (a, b)):
            return function(a, b, **kwargs)
        real = a.real * b.real - a.imag * b.imag
        return torch.complex(real, a.real * b.imag + a.imag * b.real)

    return exact


def _table() -> dict[Any, Callable[..., Any]]:
    internal: Any = getattr(torch._C, "_nn")  # noqa: B009 - no type stub has it
    table: dict[Any, Callable[..., Any]] = {F.linear: linear}
    table[F.embedding] = lambda *args, **kwargs: F.embedding(*args, **kwargs).float()
    table |= dict.fromkeys((torch.mm, Tensor.mm), product)
    for home in (F, torch):
        for name in ("grouped_mm", "_grouped_mm"):
            if hasattr(home, name):
                table[getattr(home, name)] = grouped_product
    homes = (F, torch, Tensor, torch.linalg, torch.special, internal)

    def put(names: Iterable[str], replaced: Callable[[Any], Callable[..., Any]]) -> None:
        for name, home in itertools.product(names, homes):
            if (function := getattr(home, name, None)) is not None:
                table[function] = replaced(function)

    put((*_ELEMENTWISE, "__pow__", "__rpow__"), _elementwise)
    put(("cumsum", "logcumsumexp", "cummax", "cummin"), _along_rows)
    put(("mul", "multiply", "__mul__", "__rmul__"), _of_complex)
    for name in ("logsumexp", "mean"):
        put((name,), lambda _, name=name: _over_rows(name))
    in_place = [f"{name}_" for name in (*_ELEMENTWISE, *_REFUSED)]
    for name in (*_REFUSED, *in_place):
        put((name,), lambda _, name=name: functools.partial(refuse, name))
    put(("matmul", "__matmul__", "__rmatmul__"), lambda _: _matmul)
    return table


_EXACT = _table()


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
    from millrace.models.exact import exact_kernels

    gain: Any = norm.module.weight
    return exact_kernels.Norm.apply(x, gain.to(torch.bfloat16), norm.epsilon, norm.offset)


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
