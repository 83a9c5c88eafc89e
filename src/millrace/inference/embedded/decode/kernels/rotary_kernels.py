"""Triton kernels of rotary embedding, and of the norms of queries and keys before it.

Imported on machines with CUDA only. T = rows, H = query heads, K = KV heads, D = head size.
"""

import triton
import triton.language as tl
from torch import Tensor

from millrace.inference.embedded.decode.attention import Rotation
from millrace.inference.embedded.decode.kernels.overlap_kernels import begin_kernel, overlap_options


@triton.jit
def rotate_halves(
    first,  # [heads, D / 2] float32
    second,
    at,  # [D / 2]
    angle,  # of the position: cosines, then sines
    weight,  # [D] or [heads, D]; of the norm
    eps,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Both halves of heads after their norm and rotary embedding."""
    is_inside = at < HALF
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        gains = weight + at[None, :]
        gain = tl.load(gains, mask=is_inside[None, :], other=0.0).to(tl.float32)
        first *= inverse * gain
        gain = tl.load(gains + HALF, mask=is_inside[None, :], other=0.0).to(tl.float32)
        second *= inverse * gain
    cosine = tl.load(angle + at, mask=is_inside, other=0.0)[None, :]
    sine = tl.load(angle + HALF + at, mask=is_inside, other=0.0)[None, :]
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _rotate_kernel(
    joint,  # [T, (H + 2 K) D]; queries and keys are written
    positions,  # [T] int64
    angles,  # [positions, 2, D / 2] float32
    query_weight,  # [D]; of norms, with HAS_NORM
    key_weight,
    eps,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of queries and keys
    WIDTH: tl.constexpr,  # of a row
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_kernel(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)
    is_inside = (head < HEADS) & (at < HALF)[None, :]
    place = joint + row * WIDTH + head * (2 * HALF) + at[None, :]
    first = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.where(head < QUERY_HEADS, query_weight, key_weight)
    angle = angles + tl.load(positions + row) * (2 * HALF)
    first, second = rotate_halves(first, second, at, angle, weight, eps, HALF, HAS_NORM)
    dtype = joint.dtype.element_ty
    tl.store(place, first.to(dtype), mask=is_inside)
    tl.store(place + HALF, second.to(dtype), mask=is_inside)


def rotate(
    joint: Tensor, positions: Tensor, rotation: Rotation, *, num_heads: tuple[int, int]
) -> None:
    """Apply a Rotation in place to the queries and keys of rows [T, (H + 2 K) D]."""
    heads, half = sum(num_heads), rotation.angles.shape[2]
    assert joint.is_contiguous()
    _rotate_kernel[(len(joint),)](
        joint,
        positions,
        rotation.angles,
        *(rotation.norms or (rotation.angles, rotation.angles)),
        rotation.eps,
        QUERY_HEADS=num_heads[0],
        HEADS=heads,
        WIDTH=joint.shape[1],
        HALF=half,
        HEADS_PAD=triton.next_power_of_2(heads),
        HALF_PAD=triton.next_power_of_2(half),
        HAS_NORM=rotation.norms is not None,
        num_warps=4,
        **overlap_options(),
    )
