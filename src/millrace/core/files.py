"""Names that become files: of scorers, workers and whatever else settings or sockets bring.

Promise: what passes names one file in the folder it is put into, never a place elsewhere.

Files that must be on the disk before anybody relies on them, and why they could not be.
"""

import errno
import os
from pathlib import Path

from millrace.core.errors import ConfigError

MAX_BYTES = 200  # a file system allows 255, and endings are added


def check_file_name(name: str, *, of: str) -> None:
    """`of`: whose name it is, to begin the sentence with."""
    reason = _flaw(name)
    if reason is not None:
        raise ConfigError(
            f"{of} has the name {name!r:.80}, which {reason}; files of the run are called by it,"
            " so use letters, digits, '_', '-' and '.'."
        )


def _flaw(name: str) -> str | None:
    if not name or name in (".", ".."):
        return "is no name of a file"
    if "/" in name or "\\" in name:
        return "leads to another folder"
    if not name.isprintable():
        return "holds characters that cannot be shown"
    if len(name.encode()) > MAX_BYTES:
        return "is too long"
    return None


def sync(path: Path) -> None:
    """Returns when it is on the disk: a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """The folder and everything in it."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def is_full(error: OSError) -> bool:
    """True if there was no room for what was to be written."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException) -> str:
    """What the system said, if it is anywhere behind the error; else the error's first line."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror.lower()
        behind = behind.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
