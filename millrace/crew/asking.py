"""How another process asks a running job to change its engines; see control.py for the other end.

Light to import: `millrace engines` needs nothing else.
"""

import socket
from pathlib import Path

import msgspec

from millrace.core.errors import ConfigError

CONTROL = "control"  # file of a run directory
_ANSWER_BYTES = 2**16


class Wish(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    add: int = 0  # engines
    remove: tuple[str, ...] = ()  # by name


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    engines: list[str] = []
    error: str = ""  # then nothing else counts


def ask(run_dir: Path, *, add: int = 0, remove: tuple[str, ...] = ()) -> list[str]:
    """Have a running job change its engines; returns the names of those it has then."""
    pointer = run_dir / CONTROL
    wish = Wish(add=add, remove=remove)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(pointer.read_text().strip())
            connection.sendall(msgspec.json.encode(wish) + b"\n")
            line = connection.makefile("rb").readline(_ANSWER_BYTES)
    except OSError as error:
        raise ConfigError(
            f"No run goes on in {str(run_dir)!r} on this machine ({error.strerror}); name the"
            " folder that its run_dir named."
        ) from None
    if not line:
        raise ConfigError(f"The run in {str(run_dir)!r} ended before it answered.")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error:
        raise ConfigError(answer.error)
    return answer.engines
