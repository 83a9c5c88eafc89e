"""Records as bytes, and behind them groups, or their progress.

    uint32 length of the record | the record, msgpack | the frames of what it brings, if anything

Promise: decoding gives a valid record or raises JournalError, whatever bytes it is handed, and
allocates no more than they are long. Nothing is ever unpickled.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from millrace.cluster.wire import Decoder, Frame, WireError, encode
from millrace.core.errors import JournalError
from millrace.core.partials import GroupProgress
from millrace.core.records import Group, Task
from millrace.journal.records import AnyRecord

_LENGTH = struct.Struct("<I")
_NO_TASK = Task(prompt="")
_records = msgspec.msgpack.Decoder(AnyRecord)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A record as it was read."""

    record: AnyRecord
    content: memoryview  # encoded; empty for a record that brings nothing


def encode_record(record: AnyRecord, *, content: bytes | memoryview = b"") -> list[Frame]:
    header = msgspec.msgpack.encode(record)
    return [_LENGTH.pack(len(header)), header, content]


def decode_record(payload: memoryview) -> Entry:
    header, rest = _cut(payload)
    try:
        return Entry(record=_records.decode(header), content=rest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JournalError(f"What was read is not a record of a journal: {error}.") from None


def encode_group(group: Group) -> bytes:
    """All but its task, which may hold anything, and which its number stands for."""
    try:
        frames = encode(replace(group, task=_NO_TASK))
    except WireError as error:
        raise JournalError(
            f"Group {group.number} cannot be written to the journal: {error} Or set journal.enabled"
            " to false."
        ) from None
    return _strung(frames)


def decode_group(data: memoryview, *, task: Task) -> Group:
    try:
        group = Decoder(Group).decode(_frames(data))
    except WireError as error:
        raise JournalError(f"What was read is not a group of a journal: {error}") from None
    return replace(group, task=task)


def encode_progress(progress: GroupProgress) -> bytes:
    return _strung(encode(progress))


def decode_progress(data: memoryview) -> GroupProgress:
    try:
        return Decoder(GroupProgress).decode(_frames(data))
    except WireError as error:
        raise JournalError(f"What was read is no progress of a group: {error}") from None


def _strung(frames: Sequence[Frame]) -> bytes:
    return b"".join(part for frame in frames for part in (_LENGTH.pack(_size(frame)), frame))


def _frames(data: memoryview) -> list[Frame]:
    frames: list[Frame] = []
    while len(data):
        frame, data = _cut(data)
        frames.append(frame)
    return frames


def _cut(data: memoryview) -> tuple[memoryview, memoryview]:
    """The first part, which its length precedes, and the rest."""
    if len(data) < _LENGTH.size:
        raise JournalError("What was read ends in the middle of a length.")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    end = _LENGTH.size + length
    if end > len(data):
        raise JournalError(f"What was read says that {length} bytes follow, and they do not.")
    return data[_LENGTH.size : end], data[end:]


def _size(frame: Frame) -> int:
    return memoryview(frame).nbytes
