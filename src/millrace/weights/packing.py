"""Named tensors in one flat payload: layout, packing, unpacking, checksum and delta.

Promise: unpack() returns bit for bit what pack() wrote. Floating-point tensors are sent in the
engine's dtype, biases of routers and all others as they are. Every offset, and the payload's size,
is a multiple of ALIGN_BYTES; the bytes between two tensors are never written.

A payload is a flat uint8 tensor, on the host or on a GPU. Its checksum is xxh3_64 on the host. On a
GPU, where hashing would first copy everything to the host, it is a weighted sum of 32-bit words in
exact integers: any change within one word and any exchange of two words changes it, and random
damage goes undetected once in about 2**64. Neither protects against deliberate damage.

A delta is a version as its difference from another: indices and values of the words that changed.
Promise: apply_delta(find_delta(new, old), old) is new, bit for bit. A word is as wide as the
engine's dtype, so a small step, which leaves most bfloat16 values unchanged, makes a small delta.
The blob: num_changed indices (int32, or int64 from 2**31 words on), ascending; then the words.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from millrace.core.errors import WeightError
from millrace.core.records import Delta, TensorSpec, WeightUpdate
from millrace.models.routing import ROUTER_BIAS
from millrace.weights.host_copies import copy_through_buffers

ALIGN_BYTES = 64  # a cache line, and enough for any vector load
_WORDS = {2: torch.int16, 4: torch.int32}
_CHUNK_WORDS = 2**24  # compared at a time; bounds the memory of the comparison
_COLUMNS = 4096  # of the table of words
_MIX = 0x9E3779B97F4A7C15  # odd: keeps the two sums from cancelling
_FLOATS, _INTEGERS = "float64 float32 bfloat16 float16", "int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in f"{_FLOATS} {_INTEGERS}".split()
}


def transfer_dtype(name: str, tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is sent, if floating-point weights are sent as `dtype`."""
    return dtype if tensor.is_floating_point() and not _is_exact(name) else tensor.dtype


def _is_exact(name: str) -> bool:
    """Models keep the biases of routers in float32: rounded ones choose other experts."""
    return name.rpartition(".")[2] == ROUTER_BIAS


def lay_out(
    tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> tuple[tuple[TensorSpec, ...], int]:
    """The place of each tensor in the payload, and the payload's size in bytes."""
    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in tensors.items():
        sent_as = transfer_dtype(name, tensor, dtype=dtype)
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


def pack(tensors: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors, cast, into the views of a payload."""
    if sharded := [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]:
        raise WeightError(
            f"{sharded[0]!r} is sharded over several ranks; publish it with a GatheringSender."
        )
    copy_all(views.values(), [tensors[name] for name in views])


@torch.no_grad()
def copy_all(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy each source, cast, into its target; on a GPU, one launch for all contiguous tensors of
    the same dtypes. Copies to the host are complete on return."""
    near: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    far: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if target.is_cuda == source.is_cuda:
            # One tensor that is different makes torch copy all of a list one by one.
            is_dense = target.is_contiguous() and source.is_contiguous()
            near[is_dense, target.dtype, source.dtype].append((target, source))
        else:
            far.append((target, source))
    for pairs in near.values():
        places, values = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(places, values)  # pyright: ignore[reportPrivateImportUsage]
    if far:
        copy_through_buffers(far)


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


def check_shapes(
    given: Mapping[str, Sequence[int]], *, expected: Mapping[str, tuple[int, ...]], version: int
) -> None:
    """Refuse a version whose tensors are not exactly the expected ones."""
    if missing := sorted(expected.keys() - given.keys()):
        raise WeightError(f"Version {version} lacks {missing[0]!r} ({len(missing)} missing).")
    for name, shape in given.items():
        if name not in expected:
            raise WeightError(f"Version {version} has {name!r}, which the model lacks.")
        if tuple(shape) != tuple(expected[name]):
            raise WeightError(
                f"Version {version} has {name!r} as {tuple(shape)};"
                f" the model's is {tuple(expected[name])}."
            )


def check_dtypes(specs: Sequence[TensorSpec], *, dtype: torch.dtype) -> None:
    """Refuse an update whose floating-point weights have another type than the engine's."""
    for spec in specs:
        sent_as = DTYPES[spec.dtype]
        if sent_as.is_floating_point and not _is_exact(spec.name) and sent_as != dtype:
            raise WeightError(
                f"The weight update has {spec.name!r} as {spec.dtype}, and the engine computes in"
                f" {str(dtype).removeprefix('torch.')}; give trainer and engines the same"
                " engine.dtype."
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def checksum(payload: torch.Tensor) -> int:
    """The checksum of a flat uint8 tensor."""
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


def find_delta(
    new: torch.Tensor, old: torch.Tensor, *, word_bytes: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices and values of the words that differ; None if they are not smaller than `new`."""
    new_words, old_words = new.view(_WORDS[word_bytes]), old.view(_WORDS[word_bytes])
    index_dtype = _index_dtype(len(new_words))
    left = (len(new) - 1) // (index_dtype.itemsize + word_bytes)  # changes before it is larger
    found: list[torch.Tensor] = []
    for start in range(0, len(new_words), _CHUNK_WORDS):
        chunk = slice(start, start + _CHUNK_WORDS)
        changed = (new_words[chunk] != old_words[chunk]).nonzero().squeeze(1)
        left -= len(changed)
        if left < 0:
            return None
        found.append((changed + start).to(index_dtype))
    indices = torch.cat(found) if found else torch.empty(0, dtype=index_dtype, device=new.device)
    return indices, new_words[indices.long()]


def write_delta(changes: tuple[torch.Tensor, torch.Tensor], *, into: torch.Tensor) -> None:
    indices, values = changes
    end = indices.numel() * indices.itemsize
    into[:end].view(indices.dtype).copy_(indices)
    into[end:].view(values.dtype).copy_(values)


def delta_bytes(num_changed: int, *, num_bytes: int, word_bytes: int) -> int:
    """Size of a delta with so many words of a payload of `num_bytes`."""
    return num_changed * (_index_dtype(num_bytes // word_bytes).itemsize + word_bytes)


def check_delta(update: WeightUpdate, delta: Delta) -> None:
    """Refuse a delta whose size does not fit this update."""
    sizes = {"num_bytes": update.num_bytes, "word_bytes": delta.word_bytes}
    is_possible = delta.word_bytes in _WORDS and delta.num_changed >= 0
    if not is_possible or delta.num_bytes != delta_bytes(delta.num_changed, **sizes):
        raise WeightError(f"The delta of version {update.version} has an impossible size.")


def apply_delta(
    blob: torch.Tensor, *, delta: Delta, base: torch.Tensor, into: torch.Tensor, version: int
) -> None:
    """Make `into` the payload of `version`, from that of the delta's base."""
    words = into.view(_WORDS[delta.word_bytes])
    index_dtype = _index_dtype(len(words))
    end = delta.num_changed * index_dtype.itemsize
    indices = blob[:end].view(index_dtype).to(words.device).long()
    values = blob[end : delta.num_bytes].view(words.dtype).to(words.device)
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < len(words)):
        raise WeightError(f"The delta of version {version} has an index outside its payload.")
    into.copy_(base)
    words[indices] = values


def _index_dtype(num_words: int) -> torch.dtype:
    return torch.int32 if num_words < 2**31 else torch.int64
