"""Random numbers without a generator: the draw of a token is a hash of what it is the draw for.

Promise: the number depends on (seed, completion index, token position) alone, so a completion is
the same in any batch, after preemption, after abort and resume, and on any engine. The hash is the
finaliser of SplitMix64 on 64-bit integers; int64 arithmetic wraps the same way on CPU and CUDA.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive counters land far apart
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def stream_key(seed: int, index: int) -> int:
    """Key of the random stream of one completion, as a signed 64-bit integer."""
    key = _mix((seed + GOLDEN) & _MASK)
    return signed(_mix((key ^ ((index * GOLDEN) & _MASK)) & _MASK))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1) for keys [N] int64 and token positions [N] int64."""
    x = keys + (positions + 1) * signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(FACTOR_1)
    x = (x ^ _shift(x, 27)) * signed(FACTOR_2)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).to(torch.float64) * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own carries the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * FACTOR_2) & _MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
