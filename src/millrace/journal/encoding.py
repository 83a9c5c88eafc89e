"""Groups and streamed tokens as bytes: the payloads of a journal.

    uint32 length | frame, for each frame of millrace.cluster.wire, little-endian

Promise: decoding returns a valid record or raises JournalError, whatever bytes it is given, and
allocates no more than they are long. Nothing is unpickled. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import xxhash

from millrace.cluster.wire import Decoder, Frame, WireError, encode
from millrace.core.errors import JournalError
from millrace.core.records import Completion, Group, Task

T = TypeVar("T")
LENGTH_BYTES = 4
_NO_TASK = Task(prompt="")


def checksum(payload: bytes) -> bytes:
    return xxhash.xxh3_64_digest(payload)


def encode_group(group: Group) -> bytes:
    """The group without its task, which may hold any object and is known by its number."""
    try:
        return _pack(encode(replace(group, task=_NO_TASK)))
    except WireError as error:
        raise JournalError(
            f"Group {group.number} cannot be written to the journal: {error} Or set"
            " journal.max_bytes to 0, which turns the journal off."
        ) from None


def decode_group(payload: bytes, *, task: Task) -> Group:
    return replace(_decode(Group, payload), task=task)


def encode_completion(completion: Completion) -> bytes:
    return _pack(encode(completion))


def decode_completion(payload: bytes) -> Completion:
    return _decode(Completion, payload)


def _decode(kind: type[T], payload: bytes) -> T:
    try:
        return Decoder(kind).decode(_unpack(payload))
    except WireError as error:
        raise JournalError(f"A payload of the journal is not a {kind.__name__}: {error}") from None


def _pack(frames: Sequence[Frame]) -> bytes:
    lengths = (memoryview(frame).nbytes.to_bytes(LENGTH_BYTES, "little") for frame in frames)
    return b"".join(part for pair in zip(lengths, frames, strict=True) for part in pair)


def _unpack(payload: bytes) -> list[Frame]:
    frames: list[Frame] = []
    rest = memoryview(payload)
    while rest:
        end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES], "little")
        if end > len(rest):
            raise JournalError("A payload of the journal ends in the middle of a frame.")
        frames.append(rest[LENGTH_BYTES:end])
        rest = rest[end:]
    return frames
