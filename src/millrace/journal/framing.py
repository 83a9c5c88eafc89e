"""Frames: how payloads lie in a segment file, one behind the other, so that damage shows.

    magic | length | position | synced | checksum | payload

`position` counts the records of a journal. `synced` says how much of the file was on the disk when
the frame was written: a frame that is there proves that everything before that place once was. So
damage at the end of a file is either the end of a write that a crash cut short, which nobody was
told of, or the loss of something durable.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from millrace.cluster.wire import Frame

SEGMENT_MAGIC = b"millrace journal 1\n"
_FRAME_MAGIC = b"\xa9MR1"
_HEADER = struct.Struct("<4sIQQQ")
_CHECKSUM_BYTES = 8
MAX_PAYLOAD = 2**32 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Framed:
    """A frame as it was read."""

    offset: int  # of the frame
    position: int
    synced: int
    payload: memoryview

    @property
    def end(self) -> int:
        return self.offset + _HEADER.size + len(self.payload)


def frame(payload: Sequence[Frame], *, position: int, synced: int) -> list[Frame]:
    """What to write, part by part, uncopied."""
    length = sum(memoryview(part).nbytes for part in payload)
    assert length <= MAX_PAYLOAD, "a segment is far smaller"
    unsigned = _HEADER.pack(_FRAME_MAGIC, length, position, synced, 0)[:-_CHECKSUM_BYTES]
    checksum = _checksum([unsigned, *payload])
    return [unsigned + checksum, *payload]


def scan(segment: memoryview) -> Iterator[Framed]:
    """The frames of a segment, up to the first that is not whole."""
    offset = len(SEGMENT_MAGIC)
    if segment[:offset] != SEGMENT_MAGIC:
        return
    while (found := _head(segment, offset)) is not None and _is_whole(segment, found):
        yield found
        offset = found.end


def is_torn(segment: memoryview, end: int) -> bool:
    """True if what lies behind `end`, where scan() stopped, was never known to be on the disk."""
    data = bytes(segment[end:])
    patience = 4 * len(data)  # bytes to check; bytes that nobody wrote could ask for their square
    at = data.find(_FRAME_MAGIC)
    while at >= 0:
        found = _head(segment, end + at)
        if found is not None and found.synced > end:
            patience -= len(found.payload)
            if patience < 0 or _is_whole(segment, found):
                return False
        at = data.find(_FRAME_MAGIC, at + 1)
    return True


def _head(segment: memoryview, offset: int) -> Framed | None:
    """What may be a frame, by its head alone."""
    begin = offset + _HEADER.size
    if begin > len(segment):
        return None
    magic, length, position, synced, _ = _HEADER.unpack(segment[offset:begin])
    if magic != _FRAME_MAGIC or begin + length > len(segment):
        return None
    payload = segment[begin : begin + length]
    return Framed(offset=offset, position=position, synced=synced, payload=payload)


def _is_whole(segment: memoryview, found: Framed) -> bool:
    begin = found.end - len(found.payload)
    signed = segment[found.offset : begin - _CHECKSUM_BYTES]
    return _checksum([signed, found.payload]) == segment[begin - _CHECKSUM_BYTES : begin]


def _checksum(parts: Sequence[Frame]) -> bytes:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()
