"""Private folders in the temp dir, for sockets and files of one process.

Promise: a folder goes with the process that made it. It is removed on the way out, or, where the
process was killed, by the next one that makes such a folder. Who lives is said by the system: the
owner keeps a file in it locked.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PREFIX = "millrace-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """In `parent`, by default the temp dir; nobody else can look into it."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> IO[str]:
    # Locked before it has its name: nobody may take it for a dead one's.
    unnamed = folder / f"{_LOCK}.new"
    file = unnamed.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return file


def _sweep(parent: Path) -> None:
    """Remove what killed processes of this user have left."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        # Somebody lives there, or has swept it meanwhile, or it is not ours.
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.geteuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
