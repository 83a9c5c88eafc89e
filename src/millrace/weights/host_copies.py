"""Copies between a GPU and memory of the host that is not pinned, such as shared memory.

The pieces of all tensors pass through two small pinned buffers: while one is copied to or from the
GPU, the host copies the other. So copies are as fast as the host's memory, and neither side needs
room for a second copy of a tensor: types are converted on the GPU, piece by piece.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

PIECE_BYTES = 2**26

Pair = tuple[torch.Tensor, torch.Tensor]  # target and source


class Buffer(NamedTuple):
    flat: torch.Tensor  # [PIECE_BYTES] uint8
    copied: torch.Event  # recorded when the GPU was told to copy


def copy_through_buffers(pairs: Iterable[Pair]) -> None:
    """Copy each source, cast, into its target; one of the two is on a GPU. What goes to the host
    has arrived on return."""
    buffers = [
        Buffer(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
        for _ in range(2)
    ]
    leaving: deque[tuple[Buffer, torch.Tensor]] = deque()  # the GPU, with their targets

    def arrive() -> None:
        buffer, target = leaving.popleft()
        buffer.copied.synchronize()
        target.copy_(_viewed(buffer.flat, target))

    for number, (target, source) in enumerate(pieces(pairs, piece_bytes=PIECE_BYTES)):
        buffer = buffers[number % 2]
        if target.is_cuda:
            buffer.copied.synchronize()  # returns at once if it was never recorded
            staged = _viewed(buffer.flat, source)
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
        else:
            if len(leaving) == len(buffers):
                arrive()
            _viewed(buffer.flat, target).copy_(source.to(target.dtype), non_blocking=True)
            leaving.append((buffer, target))
        device = target.device if target.is_cuda else source.device
        buffer.copied.record(torch.cuda.current_stream(device))
    while leaving:
        arrive()


def pieces(pairs: Iterable[Pair], *, piece_bytes: int) -> Iterator[Pair]:
    """The same copies in pieces, flat and of at most so many bytes on either side."""
    for target, source in pairs:
        length = piece_bytes // max(target.itemsize, source.itemsize)
        places, parts = (flat.split(length) for flat in (target.view(-1), source.reshape(-1)))
        yield from ((place, part) for place, part in zip(places, parts, strict=True) if len(part))


def _viewed(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flat[: like.nbytes].view(like.dtype)
