"""Messages over pipes: a length, then JSON.

Promise: a received message is plain data of at most the allowed size, from any sender. Nothing is
read ahead, so a process forked between two frames never had the second one in memory.
"""

import json
import os
import struct
from typing import Any

_HEADER = struct.Struct("<Q")


class FrameError(Exception):
    """The other side has closed the pipe, or sent an invalid frame."""


def frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def frames(data: bytes) -> list[Any]:
    """Decode all complete frames."""
    found: list[Any] = []
    while len(data) >= _HEADER.size:
        (length,) = _HEADER.unpack_from(data)
        body, data = data[_HEADER.size :][:length], data[_HEADER.size + length :]
        if len(body) == length:
            found.append(json.loads(body))
    return found


def send(fd: int, message: Any) -> None:
    data = memoryview(frame(message))
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BrokenPipeError:
            raise FrameError("the other side has closed the pipe") from None


def receive(fd: int, *, max_bytes: int) -> Any:
    (length,) = _HEADER.unpack(_read(fd, _HEADER.size))
    if length > max_bytes:
        raise FrameError(f"a frame of {length} bytes; the limit is {max_bytes}")
    try:
        return json.loads(_read(fd, length))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"an invalid frame: {type(error).__name__}") from None


def _read(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(fd, min(count, 2**16))
        if not part:
            raise FrameError("the other side has closed the pipe")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
