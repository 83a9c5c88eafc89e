"""The ticket of a run: a small file with all that another host needs to join.

Promise: only its owner can ever read the file. It appears complete, and it is removed when the run
ends. The ticket is a secret: anyone with a copy can join while the run lasts.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from millrace.cluster.address import ClientKeys
from millrace.core.errors import ConfigError, printable


class JoinTicket(
    msgspec.Struct, frozen=True, kw_only=True, tag="ticket-3", forbid_unknown_fields=True
):
    """The tag names the format."""

    address: str  # of the hub, as other hosts reach it
    heartbeat_timeout_s: float
    keys: ClientKeys
    token: str
    versions: dict[str, str]  # of the packages that must be the same on all hosts, and of Python

    def __repr__(self) -> str:
        return f"JoinTicket(address={self.address!r})"


@contextlib.contextmanager
def ticket_file(ticket: JoinTicket, path: Path) -> Iterator[None]:
    """Keep the ticket at `path` while the context lasts."""
    text = msgspec.json.format(msgspec.json.encode(ticket), indent=2) + b"\n"
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # An existing file may only be the ticket of a run that was killed.
            if path.is_dir() or _decode(path.read_bytes()) is None:
                raise ConfigError(
                    f"cluster.ticket = {str(path)!r} exists and is not a ticket; choose another"
                    " path."
                )
        _write_privately(path, text)
    except OSError as error:
        raise ConfigError(
            f"cluster.ticket = {str(path)!r} cannot be written: {error.strerror}; choose another"
            " path."
        ) from None
    try:
        yield
    finally:
        _remove(path, text)


def _remove(path: Path, text: bytes) -> None:
    """Remove the ticket, unless something else is there by now, such as that of another run."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if path.read_bytes() == text:
                path.unlink()
    except OSError as error:  # it must not hide how the run ended
        reason = f"cluster.ticket = {str(path)!r} cannot be removed: {error.strerror}; remove it."
        print(printable(reason), file=sys.stderr, flush=True)


def read_ticket(path: Path) -> JoinTicket:
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"Ticket {str(path)!r} cannot be read: {error.strerror}; a run writes it at its"
            " cluster.ticket, and removes it at its end."
        ) from None
    if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"Ticket {str(path)!r} is a secret that others on this machine can read;"
            f" run `chmod 600 {path}`."
        )
    ticket = _decode(data)
    if ticket is None:
        if b'"type": "ticket-' in data and b'"ticket-3"' not in data:
            raise ConfigError(
                f"Ticket {str(path)!r} was written by another version of Millrace; install the"
                " version of the run here."
            )
        raise ConfigError(
            f"{str(path)!r} is not a complete ticket; copy it again from the run's cluster.ticket."
        )
    return ticket


def own_versions() -> dict[str, str]:
    """Versions of Python and of the packages that all hosts must have in the same version."""
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in ("millrace", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package).partition("+")[0]  # without the build, such as cu130
    return found


def check_versions(ticket: JoinTicket) -> None:
    """Raise ConfigError if this host has other versions than the run."""
    own = own_versions()
    others = [
        f"{name} {own.get(name, '(none)')} instead of {wanted}"
        for name, wanted in ticket.versions.items()
        if own.get(name) != wanted
    ]
    if others:
        raise ConfigError(
            f"This host ({socket.gethostname()}) has {', '.join(others)}, which the run at"
            f" {ticket.address} has; install the same versions here."
        )


def _decode(data: bytes) -> JoinTicket | None:
    """None if it is not a ticket; the decoder's own error could quote a secret."""
    try:
        return msgspec.json.decode(data, type=JoinTicket)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write_privately(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:  # noqa: PTH123 - sets the mode
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
