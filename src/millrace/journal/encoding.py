"""Groups and streamed tokens as bytes: the payloads of a journal.

    uint32 length | frame, for each frame of millrace.cluster.wire, little-endian

Promise: decoding returns a valid record or raises JournalError, whatever bytes it is given, and
allocates no more than they are long. Nothing is unpickled. Torch-free.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

import xxhash

from millrace.cluster.wire import Decoder, Frame, WireError, encode
from millrace.core.errors import JournalError
from millrace.core.records import Completion, Group, Task

_LENGTH = struct.Struct("<I")
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
    try:
        return replace(Decoder(Group).decode(_unpack(payload)), task=task)
    except WireError as error:
        raise JournalError(f"A payload of the journal is not a group: {error}") from None


def encode_completion(completion: Completion) -> bytes:
    return _pack(encode(completion))


def decode_completion(payload: bytes) -> Completion:
    try:
        return Decoder(Completion).decode(_unpack(payload))
    except WireError as error:
        raise JournalError(f"A payload of the journal is not a completion: {error}") from None


def _pack(frames: Sequence[Frame]) -> bytes:
    sized = ((_LENGTH.pack(memoryview(frame).nbytes), frame) for frame in frames)
    return b"".join(part for pair in sized for part in pair)


def _unpack(payload: bytes) -> list[Frame]:
    frames: list[Frame] = []
    rest = memoryview(payload)
    while rest:
        if len(rest) < _LENGTH.size:
            raise JournalError("A payload of the journal ends in the middle of a length.")
        (length,) = _LENGTH.unpack(rest[: _LENGTH.size])
        end = _LENGTH.size + length
        if end > len(rest):
            raise JournalError(f"A payload of the journal ends before its frame of {length} bytes.")
        frames.append(rest[_LENGTH.size : end])
        rest = rest[end:]
    return frames
