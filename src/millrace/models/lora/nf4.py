"""NF4: weights in 4 bits, as QLoRA (Dettmers et al., 2023) holds those beneath an adapter.

A block of 64 neighbouring weights has a scale, which is its largest magnitude. Each weight is the
nearest of 16 levels, times the scale. The levels are quantiles of a normal distribution.

Promise: the values are bfloat16 numbers that depend on the weights rounded to bfloat16 alone.
Devices and data types into which a model is loaded make no difference, so engines and the trainer
have the same base. A scale is one of the weights, so it is exact in 16 bits. No library is used:
none promises that, and engines would depend on it, too, for sixty lines.

n = weights of a matrix [O, I]; T = rows of a product.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
BITS = 4 + 16 / BLOCK  # of a weight, with its share of a scale
# Those of the paper and of bitsandbytes.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n / 2] uint8, two weights in each, and scales [n / 64] bfloat16. n is a multiple of
    64."""
    blocks = weight.detach().bfloat16().float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS)
    middles = ((levels[1:] + levels[:-1]) / 2).to(weight.device)
    # A block of zeros has the scale 0, and stays zero.
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales.flatten().bfloat16()


def dequantize(
    codes: Tensor, scales: Tensor, pairs: Tensor, *, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """The weights of this shape. `pairs`: level_pairs(), on the device of the codes."""
    values = pairs.index_select(0, codes.int()).view(-1, BLOCK)
    return values.mul_(scales.float()[:, None]).bfloat16().to(dtype).view(shape)


def level_pairs() -> Tensor:  # [256, 2] float32
    """The two levels of each value of a byte."""
    return torch.cartesian_prod(*[torch.tensor(LEVELS)] * 2)


def rounded(weight: Tensor) -> Tensor:
    """The weight as it is after quantizing it, in its shape and data type."""
    codes, scales = quantize(weight)
    pairs = level_pairs().to(weight.device)
    return dequantize(codes, scales, pairs, shape=weight.shape, dtype=weight.dtype)


class _Nf4Product(torch.autograd.Function):
    """x [..., I] times the transposed weight, which exists during a product only. It keeps neither
    the weight nor x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *packed: Any) -> Tensor:
        *tensors, shape = packed
        ctx.save_for_backward(*tensors)
        ctx.shape = shape
        return F.linear(x, dequantize(*tensors, shape=shape, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = dequantize(*ctx.saved_tensors, shape=ctx.shape, dtype=grad.dtype)
        return grad @ weight, *[None] * 5


class Nf4Linear(nn.Linear):
    """Takes the place of a frozen linear layer. Its weight is computed when it is read, and is no
    parameter; in a state_dict() it is on the host, so that no device holds the whole model."""

    codes: Tensor
    scales: Tensor
    pairs: Tensor

    def __init__(self, linear: nn.Linear, *, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        packed = *quantize(linear.weight.to(device)), level_pairs().to(device)
        for name, tensor in zip(("codes", "scales", "pairs"), packed, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        shape = torch.Size((self.out_features, self.in_features))
        return dequantize(self.codes, self.scales, self.pairs, shape=shape, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the weight where it is not quantized."""
        return self.out_features * self.in_features * self.dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        device = x.device.type
        if torch.is_autocast_enabled(device):  # which does not see the product
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        shape = torch.Size((self.out_features, self.in_features))
        return _Nf4Product.apply(x, bias, self.codes, self.scales, self.pairs, shape)

    def _save_to_state_dict(
        self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.cpu()
