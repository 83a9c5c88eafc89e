"""How a collective's trainer and engines agree on the next broadcast, and the group that does it.

An engine connects to the trainer's RendezvousServer at the address in the update, and requests a
version with one line of JSON (TransferRequest). When all engines of its role have requested it, or
ADMIT_AFTER_S after the first request, the server gives each of them its rank in a group
(TransferAdmission). A group serves as long as the same engines ask. So a dead engine costs the
others ADMIT_AFTER_S, and a late engine gets its own broadcast. Evaluators and self-teachers, which
take other versions at other times, have roles of their own.

Promise: nothing but JSON is read from a socket, lines are bounded, and an engine must show the
token that its update brought. A BroadcastGroup is separate from the default group and from any that
a trainer uses. Two buckets are in flight at a time. Every failure of a group is a BroadcastFailed,
at once if a peer died and within the timeout otherwise. The group must then be closed, which makes
all other members fail at once, too.

Rank 0 is the trainer. gloo sends host memory; NCCL sends GPU memory and needs a GPU per member.
"""

import contextlib
import math
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from millrace.core.errors import WeightError

ENGINE, EVALUATOR = "engine", "evaluator"  # roles; another role has one member
ADMIT_AFTER_S = 1.0
_MAX_LINE = 2**20
_MAX_STRANGERS = 64  # connections that have not shown the token; the oldest is dropped
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
    num_bytes: int = 0  # of the payload or the delta


@dataclass(kw_only=True, slots=True, eq=False)
class RendezvousCaller:
    """One engine's connection, at the trainer."""

    socket: socket.socket
    unread: bytes = b""
    requested_s: float = 0.0  # monotonic; when its last request arrived, 0 before the first


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
        asked_s = min((caller.requested_s for caller in self._requests), default=math.inf)
        left_s = asked_s + ADMIT_AFTER_S - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(_POLL_S, left_s))):
            if key.data is None:
                connection, _ = self._listener.accept()
                connection.settimeout(self._timeout_s)
                caller = RendezvousCaller(socket=connection)
                self._selector.register(connection, selectors.EVENT_READ, caller)
                callers = [key.data for key in self._selector.get_map().values() if key.data]
                strangers = [other for other in callers if not other.requested_s]
                if len(strangers) > _MAX_STRANGERS:
                    self._drop(strangers[0])
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
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            request = msgspec.json.decode(line, type=TransferRequest)
            if request.token == self.token:
                self._requests[caller], caller.requested_s = request, time.monotonic()
                return
        self._drop(caller)

    def _drop(self, caller: RendezvousCaller) -> None:
        if caller.socket.fileno() < 0:
            return  # dropped before its event of the same poll() was handled
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


# torch exports these without naming them in its typed interface.
PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
Gloo: Any = dist.ProcessGroupGloo


class BroadcastFailed(Exception):
    """The group lost a member or exceeded its timeout."""


@contextlib.contextmanager
def _reporting_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BroadcastFailed((str(error) or type(error).__name__).splitlines()[0]) from error


def open_store(address: str, *, timeout_s: float) -> Any:
    """The store in which members of groups find each other; listens on this address only."""
    listener = listen(address)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, *, timeout_s: float) -> Any:
    with _reporting_failures():
        return TCPStore(address, port, timeout=timedelta(seconds=timeout_s))


class BroadcastGroup:
    """One member's side of the present group. Used by one thread."""

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        """`device` of the payloads; of the same type in all members."""
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._group: Any = None
        self._number = 0  # of the group; 0 = none

    def join(self, store: Any, *, number: int, rank: int, size: int, host: str) -> None:
        """Replace the group, unless it has this number already; returns when all members have
        joined. Numbers of one store are above 0 and not used again. `host`: this member's own
        address, for the others to connect to."""
        if number == self._number:
            return
        self.close()
        with _reporting_failures():
            store = PrefixStore(f"group/{number}", store)
            if self.device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            else:
                gloo = Gloo._Options()
                gloo._devices = [Gloo.create_device(hostname=host)]
                gloo._timeout = self._timeout
                self._group = Gloo(store, rank, size, gloo)
        self._number = number

    def broadcast(
        self,
        payload: torch.Tensor,  # [num_bytes] uint8: sent by rank 0, filled in all others
        *,
        bucket_bytes: int,
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        in_flight: deque[Any] = deque()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with _reporting_failures():
            with torch.cuda.stream(self._stream):  # does nothing without one
                for bucket in payload.split(bucket_bytes):
                    in_flight.append(self._group.broadcast([bucket], options))
                    if len(in_flight) == 2:
                        in_flight.popleft().wait(self._timeout)
                for work in in_flight:
                    work.wait(self._timeout)
            if self._stream is not None:
                self._stream.synchronize()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._number = None, 0
