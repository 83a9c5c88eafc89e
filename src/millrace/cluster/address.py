"""Addresses of the hub: as the user writes them, as zmq binds them, as others reach them.

How a worker, or a host that brings some, connects to the hub.
"""

import re
import socket

import zmq

from millrace.cluster import address as addresses
from millrace.cluster.credentials import ClientKeys
from millrace.core.errors import ConfigError

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+):(\d{1,5}|\*)")
_EVERYWHERE = ("0.0.0.0", "[::]")
MAX_SOCKET_PATH = 100  # bytes of a local one; the operating system's limit is 104 or 108


def to_bind(address: str) -> str:
    """cluster.address as zmq binds it: numbers for names, and * for a port of its own choice."""
    match = _TCP.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(
            f"cluster.address = {address!r} is no address; write 'auto' or 'tcp://HOST:PORT',"
            " with a host name or interface of this machine."
        )
    host, port = match[1], match[2]
    return f"tcp://{_numeric(host)}:{'*' if port in ('*', '0') else port}"


def local(bound: str) -> str:
    """Where workers on this host connect."""
    host, port = split(bound)
    return join({"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host), port)


def advertised(bound: str, *, host: str | None) -> str:
    """Where workers on other hosts connect: at `host`, or what can be known of it here."""
    bound_host, port = split(bound)
    if host is None:
        host = socket.gethostname() if bound_host in _EVERYWHERE else bound_host
    return join(f"[{host}]" if ":" in host.strip("[]") and host[0] != "[" else host, port)


def split(address: str) -> tuple[str, str]:
    """Host, in brackets if it is of IPv6, and port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port


def join(host: str, port: str) -> str:
    return f"tcp://{host}:{port}"


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


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
        return host  # the name of an interface, which zmq knows, or of nothing, which it tells


def dial(
    socket: zmq.Socket,
    address: str,
    *,
    identity: bytes,
    keys: ClientKeys | None,
    heartbeat_timeout_s: float | None,
) -> None:
    """Connect a DEALER. `heartbeat_timeout_s` is None for what the hub's own host has started."""
    socket.setsockopt(zmq.ROUTING_ID, identity)
    if addresses.is_tcp(address):
        if keys is None:
            raise ConfigError(
                f"A worker cannot connect to {address} without the run's keys; it must be started"
                " by the run or by `millrace join`."
            )
        keys.lock(socket)
        socket.setsockopt(zmq.IPV6, int(addresses.is_ipv6(address)))
    if heartbeat_timeout_s is not None:
        # What was under way is lost with a connection, and a call without its reply would wait
        # for ever. So a broken connection stays broken, and the hub takes the worker for dead.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # Of what was not sent when it broke; it is fixed then, and for ever is the default.
        socket.setsockopt(zmq.LINGER, 0)
        # Both ends drop a connection whose other end fell silent, and what is queued for it.
        timeout_ms = int(heartbeat_timeout_s * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
    socket.connect(address)
