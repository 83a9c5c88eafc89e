"""Named tensors in one payload: where each lies, how they get in and out, and the checksum.

Promise: what unpack() returns is bit for bit what pack() wrote. Floating-point tensors travel in
the engine's dtype, all others as they are. Every offset is a multiple of ALIGN_BYTES.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from millrace.core.errors import WeightError
from millrace.core.weight_update import TensorSpec

ALIGN_BYTES = 64  # a cache line, and enough for any vector load
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def travel_dtype(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is on the way, when floating-point weights travel as `dtype`."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def lay_out(
    tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> tuple[tuple[TensorSpec, ...], int]:
    """Where each tensor lies in the payload, and the payload's size in bytes."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in tensors.items():
        travels_as = travel_dtype(tensor, dtype=dtype)
        offset = math.ceil(end / ALIGN_BYTES) * ALIGN_BYTES
        end = offset + tensor.numel() * travels_as.itemsize
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(travels_as).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
            )
        )
    return tuple(specs), end


def pack(tensors: Mapping[str, torch.Tensor], specs: Iterable[TensorSpec], *, into: Any) -> None:
    """Copy the tensors, cast as their specs say, into a writable buffer."""
    views = unpack(specs, into)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])


def unpack(specs: Iterable[TensorSpec], payload: Any) -> dict[str, torch.Tensor]:
    """Views of a payload by name; they keep the payload alive."""
    return {spec.name: _view(spec, payload) for spec in specs}


def checksum(payload: Any) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def check_manifest(specs: Sequence[TensorSpec], *, num_bytes: int) -> None:
    """Refuse a manifest whose tensors do not lie inside its payload."""
    names = {spec.name for spec in specs}
    if len(names) != len(specs):
        raise WeightError("A weight update names a tensor twice; publish it again.")
    for spec in specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise WeightError(f"Weights of type {spec.dtype!r} ({spec.name}) are not known.")
        if spec.offset % ALIGN_BYTES or spec.offset < 0 or any(size < 0 for size in spec.shape):
            raise WeightError(f"The manifest places {spec.name!r} where no tensor can lie.")
        if spec.offset + math.prod(spec.shape) * dtype.itemsize > num_bytes:
            raise WeightError(f"{spec.name!r} reaches beyond the {num_bytes} bytes of its update.")


def check_fits(specs: Sequence[TensorSpec], *, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an update that is not exactly the expected tensors, by name and shape."""
    shapes = {spec.name: tuple(spec.shape) for spec in specs}
    for name, shape in expected.items():
        if name not in shapes:
            raise WeightError(f"The weight update lacks {name!r}, which the model has.")
        if shapes[name] != tuple(shape):
            raise WeightError(
                f"The weight update has {name!r} as {list(shapes[name])},"
                f" and the model as {list(shape)}."
            )
    for name in shapes:
        if name not in expected:
            raise WeightError(f"The weight update brings {name!r}, which the model does not have.")


def _view(spec: TensorSpec, payload: Any) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    count = math.prod(spec.shape)
    if count == 0:  # frombuffer takes no empty range
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=spec.offset)
    return flat.view(spec.shape)
