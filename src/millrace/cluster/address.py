"""How workers and joining hosts connect to the hub: its address, their tokens and CURVE keys.

An address has three forms: as the user writes it, as zmq binds it, and as other hosts reach it.

Promise: over TCP only holders of the client secret key can send a message, only the holder of the
hub's secret key can act as the hub, and all traffic is encrypted. Secrets travel by environment
variable and by ticket, never by command line; no repr shows one.
"""

import re
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from millrace.cluster.wire import MAX_FRAME_BYTES
from millrace.core.errors import ConfigError

VARIABLE = "MILLRACE_HUB_CREDENTIALS"  # of the environment
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq sends authentication requests
ZAP_DOMAIN = b"millrace"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """The CURVE keys of a client. Keys are Z85 text: 40 characters, no spaces."""

    server: str  # public key of the hub
    public: str
    secret: str = field(repr=False)

    def apply(self, socket: zmq.Socket) -> None:
        """Before connect: use CURVE, and accept this hub only."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Both key pairs of one run; they are as old as its hub."""

    server_secret: str = field(repr=False)
    client: ClientKeys

    @classmethod
    def make(cls) -> Self:
        if not zmq.has("curve"):
            raise ConfigError(
                "cluster.address is a TCP address, but this build of libzmq cannot authenticate"
                " (no CURVE); install pyzmq from PyPI, or set cluster.address = 'auto'."
            )
        (server, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
        keys = ClientKeys(server=server.decode(), public=public.decode(), secret=secret.decode())
        return cls(server_secret=server_secret.decode(), client=keys)

    def apply(self, socket: zmq.Socket) -> None:
        """Before bind: accept only connections that the authenticator accepts."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without an authenticator libzmq would accept any key; with this it accepts none.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The secrets of one worker."""

    token: str = field(default="", repr=False)
    keys: ClientKeys | None = None  # None if the hub listens at a local socket

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Self:
        """Remove them from the environment: processes that a worker starts must not have them."""
        return msgspec.json.decode(environment.pop(VARIABLE, "{}"), type=cls)


class TokenAuthenticator:
    """Answers the authentication requests of libzmq (ZAP, RFC 27): it accepts the client key of the
    run only. Create it before the hub binds; run() is a task on the hub's loop."""

    def __init__(self, context: zmq.asyncio.Context, *, keys: ClientKeys) -> None:
        self.num_rejected = 0  # connections with another key
        self._key = z85.decode(keys.public)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)

    async def run(self) -> None:
        while True:
            # Frames 2 to 4 are the domain, the address and the routing id.
            version, request, *_, mechanism, client_key = await self._socket.recv_multipart()
            is_valid = mechanism == b"CURVE" and client_key == self._key
            self.num_rejected += not is_valid
            status = [b"200", b"OK"] if is_valid else [b"400", b"unknown key"]
            await self._socket.send_multipart([version, request, *status, b"", b""])


_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+):(\d{1,5}|\*)")
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # by the address of all interfaces


def to_bind(address: str) -> str:
    """cluster.address as zmq binds it: numeric, and * for any free port."""
    match = _TCP.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(
            f"cluster.address = {address!r} is not an address; write 'auto' or 'tcp://HOST:PORT',"
            " with a host name or interface of this machine."
        )
    host, port = match[1], match[2]
    return f"tcp://{_numeric(host)}:{'*' if port in ('*', '0') else port}"


def local(bound: str) -> str:
    """The address for workers on this host."""
    host, port = split(bound)
    return f"tcp://{_LOOPBACK.get(host, host)}:{port}"


def advertised(bound: str, *, host: str | None) -> str:
    """The address for other hosts: at `host`, or by default at the name of this machine."""
    bound_host, port = split(bound)
    if host is None:
        host = socket.gethostname() if bound_host in _LOOPBACK else bound_host
    host = f"[{host}]" if ":" in host and host[0] != "[" else host
    return f"tcp://{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """Host, in brackets if it is an IPv6 address, and port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port


def own_address(address: str) -> str:
    """The address of this host on its route to another, numeric; of loopback if that is here."""
    if not address.startswith("tcp://"):
        return "127.0.0.1"
    host, port = split(address)
    kind, *_, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]


def free_port(address: str) -> int:
    """A port of this host that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")


def _numeric(host: str) -> str:
    if host == "*":
        return "0.0.0.0"
    if host.startswith("["):
        return host
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET)[0][4][0])
    except OSError:
        return host  # the name of an interface; zmq reports it if there is none


def connect(
    socket: zmq.Socket,
    address: str,
    *,
    identity: bytes,
    keys: ClientKeys | None,
    heartbeat_timeout_s: float | None,
) -> None:
    """Connect a DEALER socket. `heartbeat_timeout_s` is None on the host of the hub."""
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if address.startswith("tcp://"):
        if keys is None:
            raise ConfigError(
                f"A worker cannot connect to {address} without the keys of the run; start it with"
                " the run or with `millrace join`."
            )
        keys.apply(socket)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
    if heartbeat_timeout_s is not None:
        # Messages in flight are lost with a connection, and a call whose reply is lost would wait
        # without end. So there is no reconnect, and the hub declares the worker dead.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # The linger of a broken connection is fixed when it breaks; the default is unlimited.
        socket.setsockopt(zmq.LINGER, 0)
        # Both ends drop a connection whose other end is silent, with the messages queued for it.
        timeout_ms = int(heartbeat_timeout_s * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
    socket.connect(address)
