"""Messages over pipes: frames of a length and JSON, and Python values encoded as JSON.

Promise: a received message is plain data of at most the allowed size, from any sender. Nothing is
read ahead, so a process forked between two frames never had the second one in memory. unpack()
builds only plain builtin values, so no result has an __eq__ of the code under test. Subclasses
(Counter, namedtuple) travel as the builtin they extend, and views of a dict as lists. The caller
handles values that are not data.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_HEADER = struct.Struct("<Q")
Packed = Any  # None, bool, str, float, or a list [type, ...]
_COLLECTIONS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, bytes, bytearray)
}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class FrameError(Exception):
    """The other side has closed the pipe, or sent an invalid frame."""


def frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def frames(data: bytes) -> list[Any]:
    """The messages of the complete frames. The data may be large, so each frame is copied once."""
    found: list[Any] = []
    start = 0
    while len(data) - start >= _HEADER.size:
        (length,) = _HEADER.unpack_from(data, start)
        end = start + _HEADER.size + length
        if end > len(data):  # the sender was killed
            break
        found.append(json.loads(data[start + _HEADER.size : end]))
        start = end
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


def pack(value: Any, *, other: Callable[[Any], Packed]) -> Packed:
    """Pack a value; `other` packs values that are not data, or raises."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return ["int", int.__format__(value, "x")]  # decimal has a digit limit
        case float():
            return float.__float__(value)
        case complex():
            return ["complex", value.real, value.imag]
        case Decimal() | Fraction():
            return ["Decimal" if isinstance(value, Decimal) else "Fraction", str(value)]
        case dict():
            return [
                "dict",
                [[pack(k, other=other), pack(v, other=other)] for k, v in value.items()],
            ]
        case bytes() | bytearray():
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
        case range():
            bounds = (value.start, value.stop, value.step)
            return ["range", [pack(bound, other=other) for bound in bounds]]
    if isinstance(value, _VIEWS):
        value = list(value)
    for name in ("list", "tuple", "set", "frozenset", "deque"):
        if isinstance(value, _COLLECTIONS[name]):
            return [name, [pack(item, other=other) for item in value]]
    return other(value)


def unpack(packed: Packed, *, other: Callable[[list[Any]], Any]) -> Any:
    """Unpack a value; `other` unpacks lists that are not data."""
    if not isinstance(packed, list):
        return packed
    match packed:
        case ["int", str(text)]:
            return int(text, 16)
        case ["complex", float(real), float(imag)]:
            return complex(real, imag)
        case ["Decimal", str(text)]:
            return Decimal(text)
        case ["Fraction", str(text)]:
            return Fraction(text)
        case ["dict", list(pairs)]:
            return {unpack(k, other=other): unpack(item, other=other) for k, item in pairs}
        case ["bytes" | "bytearray" as name, str(text)]:
            return _COLLECTIONS[name].fromhex(text)
        case ["range", list(bounds)]:
            return range(*(unpack(bound, other=other) for bound in bounds))
        case ["list" | "tuple" | "set" | "frozenset" | "deque" as name, list(items)]:
            return _COLLECTIONS[name](unpack(item, other=other) for item in items)
        case _:
            return other(packed)


def write_back(original: Any, changed: Any) -> Any:
    """Change containers in place until they equal `changed`; returns what represents it."""
    match original, changed:
        case (list(), list()):
            merged = [write_back(a, b) for a, b in zip(original, changed, strict=False)]
            original[:] = merged + changed[len(merged) :]
        case (dict(), dict()):
            merged = {
                key: write_back(original[key], item) if key in original else item
                for key, item in changed.items()
            }
            original.clear()
            original.update(merged)
        case (set(), set()):
            original.clear()
            original.update(changed)
        case (deque(), deque()):
            original.clear()
            original.extend(changed)
        case _:
            return changed
    return original
