"""Names that become files: of scorers, workers and whatever else settings or sockets bring.

Promise: what passes names one file in the folder it is put into, never a place elsewhere.
"""

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
