"""How a collective's trainer and engines agree on the next broadcast.

An engine connects to the trainer's RendezvousServer at the address in the update, and requests a
version with one line of JSON (TransferRequest). When all engines of its role have requested it, or
ADMIT_AFTER_S after the first request, the server gives each of them its rank in a group
(TransferAdmission). A group serves as long as the same engines ask. So a dead engine costs the
others ADMIT_AFTER_S, and a late engine gets its own broadcast. Evaluators and self-teachers, which
take other versions at other times, have roles of their own.

Promise: nothing but JSON is read from a socket, lines are bounded, and an engine must show the
token that its update brought.
"""

import math
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from millrace.core.errors import WeightError

ENGINE, EVALUATOR = "engine", "evaluator"  # roles; another role has one member
ADMIT_AFTER_S = 1.0
_MAX_LINE = 2**20
_POLL_S = 0.1


class TransferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token: str
    version: int
    base: int | None  # checksum of the payload it holds, if the delta applies to it
    role: str = ENGINE


class TransferAdmission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    refusal: str = ""  # the reason; then all other fields are ignored
    group: int = 0  # number; the same as last time if the group still serves
    rank: int = 0
    size: int = 0  # the trainer and all engines in it
    is_delta: bool = False
    bucket_bytes: int = 0
    checksums: list[int] = []  # of each bucket


@dataclass(kw_only=True, slots=True, eq=False)
class RendezvousCaller:
    """One engine's connection, at the trainer."""

    socket: socket.socket
    unread: bytes = b""
    requested_s: float = 0.0  # monotonic; when its last request arrived


class RendezvousServer:
    """The trainer's side; used by one thread."""

    def __init__(self, address: str, *, num_members: Mapping[str, int], timeout_s: float) -> None:
        """`num_members`: number of engines by role."""
        self.token = secrets.token_hex(16)
        self._num_members = num_members
        self._timeout_s = timeout_s
        self._requests: dict[RendezvousCaller, TransferRequest] = {}  # unanswered, oldest first
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def poll(self) -> dict[RendezvousCaller, TransferRequest]:
        """Wait up to _POLL_S; returns callers of one role that get the same version now."""
        due_s = min(
            (caller.requested_s + ADMIT_AFTER_S for caller in self._requests), default=math.inf
        )
        wait_s = max(0.0, min(_POLL_S, due_s - time.monotonic()))
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                connection, _ = self._listener.accept()
                connection.settimeout(self._timeout_s)
                caller = RendezvousCaller(socket=connection)
                self._selector.register(connection, selectors.EVENT_READ, caller)
            else:
                self._read(key.data)
        for first, request in self._requests.items():  # the oldest come first
            wanted = request.role, request.version
            same = {c: r for c, r in self._requests.items() if (r.role, r.version) == wanted}
            is_due = time.monotonic() - first.requested_s >= ADMIT_AFTER_S
            if is_due or len(same) >= self._num_members.get(request.role, 1):
                return same
        return {}

    def answer(self, caller: RendezvousCaller, admission: TransferAdmission) -> bool:
        """False if the engine is gone."""
        self._requests.pop(caller, None)
        try:
            caller.socket.sendall(msgspec.json.encode(admission) + b"\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                self._drop(key.data)
        self._selector.close()
        self._listener.close()

    def _read(self, caller: RendezvousCaller) -> None:
        try:
            arrived = caller.socket.recv(4096)
        except OSError:
            arrived = b""
        caller.unread += arrived
        if not arrived or len(caller.unread) > _MAX_LINE:
            self._drop(caller)
            return
        line, newline, rest = caller.unread.partition(b"\n")
        if not newline:
            return
        caller.unread = rest
        try:
            request = msgspec.json.decode(line, type=TransferRequest)
        except msgspec.MsgspecError:
            request = None
        if request is None or request.token != self.token:
            self._drop(caller)
        else:
            self._requests[caller], caller.requested_s = request, time.monotonic()

    def _drop(self, caller: RendezvousCaller) -> None:
        self._requests.pop(caller, None)
        self._selector.unregister(caller.socket)
        caller.socket.close()


class RendezvousClient:
    """An engine's side; used by one thread."""

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise WeightError(
                f"The trainer cannot be reached for weights at {host}:{port} ({error}); set"
                " cluster.advertise to an address of its host that engines reach."
            ) from None
        self._lines = self._socket.makefile("rb")
        self.own_host: str = self._socket.getsockname()[0]  # the address that faces the trainer

    def request(self, request: TransferRequest) -> TransferAdmission:
        """Returns when the trainer is about to send or refuses."""
        self._socket.sendall(msgspec.json.encode(request) + b"\n")
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the trainer closed the connection")
        return msgspec.json.decode(line, type=TransferAdmission)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address, and on no other address."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4], family=found[0][0])
    except OSError as error:
        raise WeightError(
            f"Cannot listen for engines at {address!r} ({error.strerror or error}); set"
            " cluster.advertise or cluster.address to an address of the trainer's host."
        ) from None
