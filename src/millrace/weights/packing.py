"""Named tensors in one flat payload: layout, packing, unpacking and checksum.

Promise: unpack() returns bit for bit what pack() wrote. Floating-point tensors are sent in the
engine's dtype, all others as they are. Every offset, and the payload's size, is a multiple of
ALIGN_BYTES; the bytes between two tensors are never written.

A payload is a flat uint8 tensor, on the host or on a GPU. Both ends compute the same checksum for
the same bytes. On the host it is xxh3_64, at memory speed. Hashing on a GPU would first copy
everything to the host, so there it is a weighted sum of 32-bit words, computed in one pass on the
device. The sum uses exact integers. Any change within one word and any exchange of two words
changes it; random damage goes undetected once in about 2**64. Like xxh3, it does not protect
against deliberate damage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch.distributed.tensor import DTensor

from millrace.core.errors import WeightError
from millrace.core.records import TensorSpec

ALIGN_BYTES = 64  # a cache line, and enough for any vector load
_COLUMNS = 4096  # of the table of words
_MIX = 0x9E3779B97F4A7C15  # odd: keeps the two sums from cancelling
_FLOATS, _INTEGERS = "float64 float32 bfloat16 float16", "int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in f"{_FLOATS} {_INTEGERS}".split()
}


def transfer_dtype(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is sent, if floating-point weights are sent as `dtype`."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def lay_out(
    tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> tuple[tuple[TensorSpec, ...], int]:
    """The place of each tensor in the payload, and the payload's size in bytes."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in tensors.items():
        sent_as = transfer_dtype(tensor, dtype=dtype)
        offset = end
        end = _aligned(offset + tensor.numel() * sent_as.itemsize)
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(sent_as).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
            )
        )
    return tuple(specs), end


def pack(
    tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], payload: torch.Tensor
) -> None:
    """Copy the tensors, cast as their specs say, into a payload."""
    if sharded := [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]:
        raise WeightError(f"{sharded[0]!r} is sharded over several ranks; gather it first.")
    views = unpack(specs, payload)
    copy_all(views.values(), [tensors[name] for name in views])


@torch.no_grad()
def copy_all(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy each source, cast, into its target; one launch for all tensors on a GPU."""
    if targets := list(targets):
        torch._foreach_copy_(targets, list(sources))  # pyright: ignore[reportPrivateImportUsage]


def unpack(specs: Iterable[TensorSpec], payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a payload by name; they keep the payload alive."""
    views: dict[str, torch.Tensor] = {}
    for spec in specs:
        dtype = DTYPES[spec.dtype]
        end = spec.offset + math.prod(spec.shape) * dtype.itemsize
        views[spec.name] = payload[spec.offset : end].view(dtype).view(spec.shape)
    return views


def check_manifest(specs: Sequence[TensorSpec], *, num_bytes: int) -> None:
    """Refuse a manifest whose tensors do not fill its payload exactly."""
    if len({spec.name for spec in specs}) != len(specs):
        raise WeightError("A weight update names a tensor twice; publish it again.")
    end = 0
    for spec in specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise WeightError(f"{spec.name!r} has the unknown type {spec.dtype!r}.")
        if spec.offset % ALIGN_BYTES or spec.offset < end or any(size < 0 for size in spec.shape):
            raise WeightError(f"The manifest gives {spec.name!r} an impossible offset or shape.")
        end = _aligned(spec.offset + math.prod(spec.shape) * dtype.itemsize)
        if end > num_bytes:
            raise WeightError(f"{spec.name!r} exceeds the {num_bytes} bytes of its update.")
    if end != num_bytes:
        raise WeightError(
            f"A weight update of {num_bytes} bytes has {end} bytes of tensors; publish it again."
        )


def check_fits(
    specs: Sequence[TensorSpec],
    *,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse an update whose tensors are not exactly the expected ones."""
    if missing := expected.keys() - {spec.name for spec in specs}:
        raise WeightError(f"The weight update lacks {min(missing)!r}, which the model has.")
    for spec in specs:
        shape = expected.get(spec.name)
        if shape is None:
            raise WeightError(f"The weight update has {spec.name!r}, which the model lacks.")
        if tuple(spec.shape) != tuple(shape):
            raise WeightError(
                f"The weight update has {spec.name!r} as {list(spec.shape)},"
                f" and the model as {list(shape)}."
            )
        if dtype not in (None, DTYPES[spec.dtype]) and DTYPES[spec.dtype].is_floating_point:
            raise WeightError(
                f"The weight update has {spec.name!r} as {spec.dtype}, and the engine computes in"
                f" {str(dtype).removeprefix('torch.')}; give trainer and engines the same"
                " engine.dtype."
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def checksum(payload: torch.Tensor) -> int:
    """Of a flat uint8 tensor."""
    if payload.is_cuda:
        return word_sum(payload)
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def word_sum(payload: torch.Tensor) -> int:
    """Sums of the words as a table of rows, weighted by row and by column."""
    if odd := len(payload) % 4:  # of a delta: an index has 4 bytes, a bfloat16 value 2
        payload = torch.cat([payload, payload.new_zeros(4 - odd)])
    words = payload.view(torch.int32)
    num_whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:num_whole].view(-1, _COLUMNS)
    tail = words[num_whole:]
    # int64 wraps around, which is addition modulo 2**64, so the order does not matter.
    if table.is_cuda:
        from millrace.weights.checksum_kernels import weighted_sums

        by_row, by_column = weighted_sums(table)
    else:
        by_row, by_column = (_weighted(table.sum(dim, dtype=torch.int64)) for dim in (1, 0))
    by_row += (2 * len(table) + 1) * tail.sum(dtype=torch.int64)
    by_column += _weighted(tail.long())
    row_sum, column_sum = torch.stack([by_row, by_column]).tolist()
    return (row_sum + _MIX * column_sum) % 2**64


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)
    return (sums * weights).sum()
