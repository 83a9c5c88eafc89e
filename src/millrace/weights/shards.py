"""Which rank holds which part of each tensor, and in which order the parts are gathered.

Promise: the pieces of a plan cover every value of every tensor exactly once, each on a rank that
holds it, in buckets of at most bucket_bytes. Ranks that know the same boxes make the same plan.

A tensor is a DTensor over any mesh, sharded evenly or not along any dimensions or replicated; or a
plain tensor, which every rank has.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from millrace.core.errors import WeightError
from millrace.core.records import TensorSpec
from millrace.weights.packing import DTYPES

PIECE_ALIGN_BYTES = 16  # of a piece in its bucket: any dtype can be viewed there


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a tensor: its offset and shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def within(
        self, tensor: torch.Tensor, *, origin: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A view of the box in a tensor whose first value is at `origin`, by default at 0."""
        starts = self.offset
        if origin is not None:
            starts = tuple(start - first for start, first in zip(starts, origin, strict=True))
        return tensor[tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))]

    def overlaps(self, other: "Box") -> bool:
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def split(self, max_values: int) -> Iterator["Box"]:
        """Row slices of at most max_values; a larger row is split like a tensor."""
        if self.num_values <= max(max_values, 1):
            yield self
            return
        axis = next(i for i, size in enumerate(self.shape) if size > 1)
        rows = max(1, max_values // math.prod(self.shape[axis + 1 :]))
        for start in range(0, self.shape[axis], rows):
            offset, shape = [*self.offset], [*self.shape]
            offset[axis] += start
            shape[axis] = min(rows, self.shape[axis] - start)
            yield from Box(offset=tuple(offset), shape=tuple(shape)).split(max_values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    spec: TensorSpec
    rank: int  # that sends it
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_values * DTYPES[self.spec.dtype].itemsize

    @property
    def room_bytes(self) -> int:
        return -(-self.num_bytes // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES


def box_of(name: str, tensor: torch.Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return Box(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise WeightError(
            f"{name!r} is a partial sum on each rank and cannot be published; reduce it first."
        )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(offset=tuple(offset), shape=tuple(shape))


def plan(
    specs: Sequence[TensorSpec],
    boxes: Sequence[Sequence[Box]],  # [num_ranks][num_tensors]
    *,
    bucket_bytes: int,
) -> tuple[list[ShardPiece], list[list[ShardPiece]]]:
    """The pieces of rank 0, and the buckets of pieces that the others send to it."""
    own: list[ShardPiece] = []
    buckets: list[list[ShardPiece]] = []
    room = 0
    # The size of a piece is rounded up, so a bucket holds whole multiples only.
    most = bucket_bytes // PIECE_ALIGN_BYTES * PIECE_ALIGN_BYTES
    for index, spec in enumerate(specs):
        for box, rank in _owners(spec, [of_rank[index] for of_rank in boxes]).items():
            if rank == 0:
                own.append(ShardPiece(spec=spec, rank=0, box=box))
                continue
            for part in box.split(most // DTYPES[spec.dtype].itemsize):
                piece = ShardPiece(spec=spec, rank=rank, box=part)
                if piece.room_bytes > room:
                    buckets.append([])
                    room = bucket_bytes
                buckets[-1].append(piece)
                room -= piece.room_bytes
    return own, buckets


def _owners(spec: TensorSpec, boxes: Sequence[Box]) -> dict[Box, int]:
    """Each distinct part of a tensor, and the lowest rank that has it."""
    owners: dict[Box, int] = {}
    for rank, box in enumerate(boxes):
        if box.num_values:
            owners.setdefault(box, rank)
    covered = sum(box.num_values for box in owners)
    if covered != math.prod(spec.shape) or any(a.overlaps(b) for a, b in combinations(owners, 2)):
        raise WeightError(
            f"The shards of {spec.name!r} do not tile the tensor of shape {list(spec.shape)};"
            " redistribute it to Shard or Replicate placements."
        )
    return owners


def boxes_of(numbers: Iterable[int], dims: Iterable[int]) -> list[Box]:
    """Boxes from the offset and shape of each, which has so many dimensions."""
    left = iter(numbers)
    return [Box(offset=tuple(islice(left, n)), shape=tuple(islice(left, n))) for n in dims]


def size_of(pieces: Sequence[ShardPiece]) -> int:
    return sum(piece.room_bytes for piece in pieces)


def places_of(
    pieces: Sequence[ShardPiece], buffer: torch.Tensor
) -> Iterator[tuple[ShardPiece, torch.Tensor]]:
    """Views of each piece in its rank's buffer."""
    at = 0
    for piece in pieces:
        flat = buffer[at : at + piece.num_bytes].view(DTYPES[piece.spec.dtype])
        yield piece, flat.view(piece.box.shape)
        at += piece.room_bytes
