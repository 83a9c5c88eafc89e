"""Reads and writes messages of Protocol Buffers, without descriptors.

A message is a table from field numbers to all values of the field: int for varints, and bytes for
everything else. Promise: reading takes time in proportion to the size, and a damaged message raises
ApiError.
"""

import struct
from collections.abc import Iterable

from millrace.serving.api.errors import ApiError

Fields = dict[int, list[int | bytes]]
_FIXED_BYTES = {1: 8, 5: 4}  # of wire types


def read(data: bytes) -> Fields:
    fields: Fields = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if (kind := key & 7) == 0:
            value, at = _read_varint(data, at)
        elif kind == 2 or kind in _FIXED_BYTES:
            size, at = _read_varint(data, at) if kind == 2 else (_FIXED_BYTES[kind], at)
            value, at = data[at : at + size], at + size
        else:
            raise ApiError(f"The body is not protobuf: it has a field of wire type {kind}.")
        fields.setdefault(key >> 3, []).append(value)
    if at > len(data):
        raise ApiError("The body is not protobuf: it ends within a field.")
    return fields


def messages(fields: Fields, number: int) -> list[bytes]:
    """All values of a field with messages, bytes, text or doubles."""
    return [value for value in fields.get(number, []) if isinstance(value, bytes)]


def message(fields: Fields, number: int) -> bytes:
    """The last value of such a field; empty if there is none."""
    return b"".join(messages(fields, number)[-1:])


def integers(fields: Fields, number: int) -> list[int]:
    """All values of a field of integers, packed or not."""
    found: list[int] = []
    for value in fields.get(number, []):
        at, packed = 0, value if isinstance(value, bytes) else write_varint(value)
        while at < len(packed):
            one, at = _read_varint(packed, at)
            found.append(one)
    return found


def mapping(fields: Fields, number: int) -> dict[str, Fields]:
    """A map from text to messages."""
    entries = [read(entry) for entry in messages(fields, number)]
    return {message(e, 1).decode(errors="replace"): read(message(e, 2)) for e in entries}


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at + shift // 7 : at + shift // 7 + 1]
        if not byte:
            break
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value, at + shift // 7 + 1
    raise ApiError("The body is not protobuf: it ends within a number.")


def write_varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def write(fields: Iterable[tuple[int, int | float | str | bytes]]) -> bytes:
    """A message of these fields: int as varint, float as double, text and bytes with their size."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [write_varint(number << 3), write_varint(value)]
        elif isinstance(value, float):
            parts += [write_varint(number << 3 | 1), struct.pack("<d", value)]
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += [write_varint(number << 3 | 2), write_varint(len(data)), data]
    return b"".join(parts)
