"""What adapters add to a matrix product, beside it instead of in its weight.

All adapters of a product lie side by side: A x is computed for every one of them, what a row does
not use is multiplied by zero, and one product with all B brings it back. So the work has the same
shape whatever adapters the rows use: CUDA graphs and compiled layers stay valid.

T = rows of the pass, I and O = what the product takes in and gives out, S = adapters, K = their
ranks together, N = layers that share the product (query, key and value, say).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdapterChoice:
    """Which adapter each row of a pass uses; shared by all layers. Set before every pass."""

    def __init__(self, column_slots: Tensor, *, dtype: torch.dtype) -> None:
        """`column_slots` [K]: whose each column is."""
        self._column_slots = column_slots
        self._dtype = dtype
        self.slots = column_slots[:0]  # [T] int64; S = none
        self.mask = column_slots[:0, None].to(dtype)  # [T, K]

    def set(self, slots: Tensor) -> None:
        """Runs inside CUDA graphs."""
        self.slots = slots
        self.mask = (slots[:, None] == self._column_slots).to(self._dtype)


class UnmergedLora:
    """The adapters beside one product. A plain object, so that none of it is a weight of the
    model."""

    def __init__(
        self, a: Tensor, b: Tensor, *, gains: Tensor | None, choice: AdapterChoice
    ) -> None:
        # Parameters, because torch.compile takes their shapes for constants.
        self._a = frozen(a)  # [N K, I]
        self._b = frozen(b)  # [O, N K]; zero where row and column are of different layers
        self._gains = None if gains is None else frozen(gains)  # [S + 1, O] float32
        self._choice = choice

    def add(self, output: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """[..., T, O]: the product's output for x [..., T, I], with each row's adapter added."""
        mask = self._choice.mask
        assert x.shape[-2] == mask.shape[0], "an adapted layer sees every row of a pass, once"
        inner = F.linear(x, self._a)
        inner = (inner.unflatten(-1, (-1, mask.shape[1])) * mask[:, None]).flatten(-2)
        output = output + F.linear(inner, self._b)
        if self._gains is None:
            return output
        gain = self._gains[self._choice.slots]
        if bias is None:
            return (output * gain).to(output.dtype)
        return ((output - bias) * gain + bias).to(output.dtype)


def add_lora(linear: nn.Linear, side: UnmergedLora) -> None:
    holder: Any = linear
    holder.side = side
    # One function for all layers: of functions of their own, torch.compile would want to make a
    # program for each.
    linear.register_forward_hook(_add_side)


def _add_side(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.side.add(output, inputs[0], linear.bias)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
