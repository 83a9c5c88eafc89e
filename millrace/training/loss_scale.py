"""Keeps gradients within the range of float16.

Most gradients of a language model are smaller than the smallest float16 number. So the loss is
multiplied by a power of two before the backward pass, and the gradients are divided by it: in
between they lie where float16 is precise. The power is as large as has lately been possible.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_FIRST = 2.0**16
_LARGEST = 2.0**24
_PATIENCE = 200  # steps without overflow before a larger scale is tried


class LossScale:
    """Used by the trainer's thread. Where it is off, the scale is 1 and stays so."""

    def __init__(self, *, is_on: bool) -> None:
        self.value = _FIRST if is_on else 1.0
        self._is_on = is_on
        self._num_good = 0

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide in place."""
        if self._is_on:
            for gradient in gradients:
                gradient.div_(self.value)

    def lower(self) -> bool:
        """After a step whose gradients overflowed; False if the scale cannot be the reason."""
        self._num_good = 0
        if self.value <= 1.0:
            return False
        self.value /= 2
        return True

    def succeeded(self) -> None:
        """After a step whose gradients were finite."""
        self._num_good += 1
        if self._is_on and self._num_good % _PATIENCE == 0:
            self.value = min(2 * self.value, _LARGEST)
