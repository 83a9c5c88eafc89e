"""Messages over pipes: a length, then JSON.

Promise: what is received is data, whoever sent it, and never more of it than was asked for.
Nothing is read ahead, so a process forked between two frames never held the second.
"""

import json
import os
import struct
from typing import Any

_HEADER = struct.Struct("<Q")


class FrameError(Exception):
    """The other side is gone, or did not send a frame."""


def frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def frames(data: bytes) -> list[Any]:
    """The frames that are whole."""
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
            raise FrameError("the other side is gone") from None


def receive(fd: int, *, max_bytes: int) -> Any:
    (length,) = _HEADER.unpack(_read(fd, _HEADER.size))
    if length > max_bytes:
        raise FrameError(f"a frame of {length} bytes, where {max_bytes} are allowed")
    try:
        return json.loads(_read(fd, length))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a frame: {type(error).__name__}") from None


def _read(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(fd, min(count, 2**16))
        if not part:
            raise FrameError("the other side is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
