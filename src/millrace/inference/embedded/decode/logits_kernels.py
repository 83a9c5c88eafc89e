"""Functions that all sampling kernels share: scaled logits, random numbers and the draw.

Imported on machines with CUDA only.
"""

import triton
import triton.language as tl

from millrace.inference.embedded.sampler import FACTOR_1, FACTOR_2, GOLDEN, signed

CANDIDATES = tl.constexpr(1024)  # most tokens per row that truncation_kernels.py can sort
_GOLDEN = tl.constexpr(signed(GOLDEN))
_FACTOR_1 = tl.constexpr(signed(FACTOR_1))
_FACTOR_2 = tl.constexpr(signed(FACTOR_2))


@triton.jit
def scaled(logits, row, at, temperature, vocab):
    x = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=-float("inf"))
    return x / temperature


@triton.jit
def temperature_of(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0.0, 1.0, temperature)  # greedy rows report logprobs at 1


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)  # logical: int64 carries its sign along


@triton.jit
def uniform(key, index):
    x = key + (index + 1) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FACTOR_1
    x = (x ^ _shifted(x, 27)) * _FACTOR_2
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def inverse_cdf(weight, at, target):
    """The first of the places `at` up to which the weights, float64, exceed `target`."""
    place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    return tl.minimum(place, tl.max(tl.where(weight > 0.0, at, 0), 0))


@triton.jit
def is_sampled(num_candidates, row):
    """True if the row had at most CANDIDATES candidates, and so was sampled from them."""
    return tl.load(num_candidates + row) <= CANDIDATES
