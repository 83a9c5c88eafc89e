"""FP8 numbers: float8_e4m3fn values with a float32 scale for each row.

Promise: a row's largest value becomes 448, the largest FP8 value, so no value overflows. A value
that is at least 1/28,672 of it keeps a relative error of at most 1/16; a smaller one, an absolute
error of at most 1/458,752 of it. Rows do not depend on each other. NaN and infinity stay visible:
their row becomes NaN.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_TINY = 1e-12  # largest value of a row of zeros, instead of 0


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values of the shape of x [..., I], and the scale [..., 1] of each row."""
    scales = x.abs().amax(-1, keepdim=True).float().clamp_min(_TINY) / _LARGEST
    return (x / scales).to(FP8), scales
