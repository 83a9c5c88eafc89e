"""Private folders in the temp dir, for sockets and files of one process.

Promise: a folder does not outlive its process for long. The process removes it at its end; if the
process was killed, the next one that creates such a folder does. The owner of a folder keeps a file
in it locked, so the operating system says whether the owner is alive.
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
    """A folder in `parent`, by default the temp dir, that no other user can enter."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> IO[str]:
    # Locked before it has its name, or another process could take its owner for dead.
    unnamed = folder / f"{_LOCK}.new"
    file = unnamed.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return file


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's killed processes."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        # Its owner is alive, another process has removed it, or it is another user's.
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.geteuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
