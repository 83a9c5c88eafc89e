"""Files that must be on the disk before anybody relies on them, and why they could not be."""

import errno
import os
from pathlib import Path


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
