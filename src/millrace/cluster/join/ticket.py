"""The ticket of a run: all that a host needs to bring workers into it, in one small file.

Promise: only its owner can read the file, from its first byte on; it appears whole, and it is gone
when the run is over. Whoever holds a copy can join while the run lasts: it is a secret.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from millrace.cluster.credentials import ClientKeys
from millrace.core.errors import ConfigError


class JoinTicket(
    msgspec.Struct, frozen=True, kw_only=True, tag="ticket-1", forbid_unknown_fields=True
):
    """The tag names the format."""

    address: str  # of the hub, as other hosts reach it
    heartbeat_timeout_s: float
    server_key: str
    client_key: str
    client_secret: str
    token: str

    def __repr__(self) -> str:
        return f"Ticket(address={self.address!r})"

    @property
    def keys(self) -> ClientKeys:
        return ClientKeys(server=self.server_key, public=self.client_key, secret=self.client_secret)


@contextlib.contextmanager
def offered(ticket: JoinTicket, path: Path) -> Iterator[None]:
    """The ticket lies at `path` for as long as the context lasts."""
    _check_place(path)
    text = msgspec.json.format(msgspec.json.encode(ticket), indent=2) + b"\n"
    try:
        _write_privately(path, text)
    except OSError as error:
        raise ConfigError(
            f"cluster.ticket = {str(path)!r} cannot be written: {error.strerror}; choose another"
            " path."
        ) from None
    try:
        yield
    finally:
        # Another run may have put its own there.
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == text:
                path.unlink()


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
        raise ConfigError(
            f"{str(path)!r} is no ticket, or not a whole one; copy it again from the run's"
            " cluster.ticket."
        )
    return ticket


def _check_place(path: Path) -> None:
    """What lies there already may be the ticket of a run that was killed, and nothing else."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_dir() or _decode(path.read_bytes()) is None:
            raise ConfigError(
                f"cluster.ticket = {str(path)!r} exists and is no ticket; choose another path."
            )


def _decode(data: bytes) -> JoinTicket | None:
    """None for anything else; the decoder's own words could quote a secret."""
    try:
        return msgspec.json.decode(data, type=JoinTicket)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write_privately(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(partial, flags, 0o600), "wb") as file:  # noqa: PTH123 - mode from birth
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
