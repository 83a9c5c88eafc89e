"""Unmerged LoRA: adapters computed beside a matrix product instead of merged into its weight.

All adapters of a product lie side by side. A x is computed for all of them, multiplied by zero for
those that a row does not use, and multiplied by all B at once. So the shapes do not depend on the
adapters that the rows use, and CUDA graphs and compiled layers stay valid.

T = rows of the pass, I and O = input and output size of the product, S = adapters, K = sum of their
ranks, N = layers that share the product (such as query, key and value).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdapterChoice:
    """The adapter of each row of a pass; shared by all layers. Set before every pass."""

    def __init__(self, column_slots: Tensor, *, dtype: torch.dtype) -> None:
        self._column_slots = column_slots  # [K]; the adapter of each column
        self._dtype = dtype
        self.slots = column_slots[:0]  # [T] int64; S = none
        self.mask = column_slots[:0, None].to(dtype)  # [T, K]

    def set(self, slots: Tensor) -> None:
        """Runs inside CUDA graphs."""
        self.slots = slots
        self.mask = (slots[:, None] == self._column_slots).to(self._dtype)


class UnmergedLora:
    """The adapters of one product. A plain object, so that its tensors are not model weights."""

    def __init__(
        self, a: Tensor, b: Tensor, *, gains: Tensor | None, choice: AdapterChoice
    ) -> None:
        # Parameters, because torch.compile treats their shapes as constants.
        self._a = frozen(a)  # [N K, I]
        self._b = frozen(b)  # [O, N K]; zero where row and column belong to different layers
        self._gains = None if gains is None else frozen(gains)  # [S + 1, O] float32
        self._choice = choice

    def add(self, output: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product's output [..., T, O] for x [..., T, I], with each row's adapter added."""
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
    # One function for all layers: torch.compile would build a program for each closure.
    linear.register_forward_hook(_add_side)


def _add_side(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.side.add(output, inputs[0], linear.bias)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
