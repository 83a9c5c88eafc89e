"""Files: valid names, data that is certainly on the disk, private files and folders, growing files.

Promises: a checked name is one file in the folder it is put into, never a path elsewhere. A private
folder does not outlive its process for long: the process removes it at its end, and if the process
was killed, the next one that creates such a folder does. The owner of a folder keeps a file in it
locked, so the operating system says whether the owner is alive. A FileTail returns each complete
line once.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

from millrace.core.errors import ConfigError

MAX_BYTES = 200  # a file system allows 255, and endings are added


def check_file_name(name: str, *, of: str) -> None:
    """Raise ConfigError unless it is a file name. `of`: owner of the name, such as "A worker"."""
    if not name or name in (".", ".."):
        flaw = "is not a file name"
    elif "/" in name or "\\" in name:
        flaw = "leads to another folder"
    elif not name.isprintable():
        flaw = "has unprintable characters"
    elif len(name.encode()) > MAX_BYTES:
        flaw = "is too long"
    else:
        return
    raise ConfigError(
        f"{of} has the name {name!r:.80}, which {flaw}; files of the run are named after it, so use"
        " letters, digits, '_', '-' and '.'."
    )


def sync(path: Path) -> None:
    """Return when the bytes of a file, or the names in a folder, are on the disk."""
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
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException) -> str:
    """The operating system's words from the error or its context; else its first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextlib.contextmanager
def private_files() -> Generator[None]:
    """Files that this process and its children create meanwhile belong to the user alone: 0600, and
    folders 0700. The mask is one of the whole process: runs in several threads share it."""
    _MASKS.append(os.umask(0o077))
    try:
        yield
    finally:
        before = _MASKS.pop()
        if not _MASKS:
            os.umask(before)


_MASKS: list[int] = []  # that the runs of this process have replaced; the first is the user's own

PREFIX = "millrace-"
MAX_SOCKET_PATH = 100  # bytes; operating systems allow 104 or 108
_MAX_NAME = len(f"/{PREFIX}12345678/12345")  # a private folder and a socket in it
_LOCK = "owner.lock"


@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Generator[Path]:
    """A folder in `parent` that no other user can enter. By default that is the temp dir, or /tmp
    if sockets could not have so long a path."""
    if parent is None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + _MAX_NAME > MAX_SOCKET_PATH and os.access("/tmp", os.W_OK):
            parent = Path("/tmp")
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        # Locked before it has its name, or another process could take its owner for dead.
        unnamed = folder / f"{_LOCK}.new"
        with unnamed.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            unnamed.rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_owner(folder: Path) -> bool:
    """Whether a living process owns this private folder."""
    try:
        with (folder / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's killed processes."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        # Its owner is alive, another process has removed it, or it is another user's.
        with contextlib.suppress(OSError):
            # Not through a link: in the folder of another user it may lead to a file of this one.
            status = lock.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)


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
