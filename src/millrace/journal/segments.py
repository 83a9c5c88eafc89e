"""Segment files: RUN_DIR/journal/00000001.log and on.

Promise: a segment is only ever appended to, and sealed before the next begins: everything in it is
on the disk then, so that only the newest can have a torn end.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.cluster.wire import Frame
from millrace.core import files as storage
from millrace.journal.framing import SEGMENT_MAGIC

SUFFIX = ".log"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordLocation:
    """Where an encoded group lies, or a part of one."""

    segment: int
    offset: int
    length: int


class Sink(Protocol):
    """An open segment file."""

    def write(self, parts: Sequence[Frame]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


OpenSink = Callable[[Path], Sink]


class FileSink:
    """On a disk. One thread uses it at a time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        storage.sync(path.parent)

    def write(self, parts: Sequence[Frame]) -> None:
        rest = memoryview(b"".join(parts))
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        os.fdatasync(self._file) if hasattr(os, "fdatasync") else os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class UnsyncedSink(FileSink):
    """Survives the death of processes, not that of the machine."""

    def sync(self) -> None:
        """The system writes it when it likes."""


class Segments:
    """The folder of a journal. Reading is safe from any thread; the writer alone adds segments, and
    whoever removes one has seen to it that nobody needs it."""

    def __init__(self, folder: Path, *, open_sink: OpenSink = FileSink) -> None:
        self.folder = folder
        self._open_sink = open_sink

    def ids(self) -> list[int]:
        """Ascending."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}{SUFFIX}"

    def begin(self, segment: int) -> Sink:
        sink = self._open_sink(self.path(segment))
        sink.write([SEGMENT_MAGIC])
        return sink

    def read(self, segment: int) -> memoryview:
        return memoryview(self.path(segment).read_bytes())

    def read_at(self, place: RecordLocation) -> memoryview:
        with self.path(place.segment).open("rb") as file:
            file.seek(place.offset)
            return memoryview(file.read(place.length))

    def cut(self, segment: int, *, end: int) -> None:
        """Remove what lies behind `end`."""
        if end == 0:
            self.remove([segment])
            return
        path = self.path(segment)
        os.truncate(path, end)
        storage.sync(path)

    def remove(self, segments: Sequence[int]) -> None:
        for segment in segments:
            self.path(segment).unlink(missing_ok=True)
        if segments:
            storage.sync(self.folder)
