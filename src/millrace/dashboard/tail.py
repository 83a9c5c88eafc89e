"""Reads a growing file piece by piece.

Promise: each complete line is returned once. A file that was replaced or cut, as when a run is
resumed or a trace is moved aside, is read again from its start. Used by one thread.
"""

from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 4 * 2**20


class FileTail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None  # device and inode
        self._offset = 0  # of the first line that was not returned

    def has_restarted(self) -> bool:
        """True if the file is no longer the one that was read; it is then read from its start."""
        if not self.path.is_file():
            return False
        status = self.path.stat()
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        if before in (None, self._identity) and status.st_size >= self._offset:
            return False
        self._offset = 0
        return True

    def chunks(self) -> Iterator[bytes]:
        """What was appended, as pieces of whole lines; a last line without its end is left."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while piece := file.read(CHUNK_BYTES):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                self._offset += len(whole + newline)
                yield whole
