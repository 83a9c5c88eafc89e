"""Addresses of the hub, and how workers and joining hosts connect to it.

An address has three forms: as the user writes it, as zmq binds it, and as other hosts reach it.
"""

import re
import socket

import zmq

from millrace.cluster import address as addresses
from millrace.cluster.credentials import ClientKeys
from millrace.core.errors import ConfigError

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+):(\d{1,5}|\*)")
_ANY_INTERFACE = ("0.0.0.0", "[::]")
MAX_SOCKET_PATH = 100  # bytes; operating systems allow 104 or 108


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
    return join({"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host), port)


def advertised(bound: str, *, host: str | None) -> str:
    """The address for other hosts: at `host`, or by default at the name of this machine."""
    bound_host, port = split(bound)
    if host is None:
        host = socket.gethostname() if bound_host in _ANY_INTERFACE else bound_host
    return join(f"[{host}]" if ":" in host.strip("[]") and host[0] != "[" else host, port)


def split(address: str) -> tuple[str, str]:
    """Host, in brackets if it is an IPv6 address, and port."""
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
    if addresses.is_tcp(address):
        if keys is None:
            raise ConfigError(
                f"A worker cannot connect to {address} without the keys of the run; start it with"
                " the run or with `millrace join`."
            )
        keys.apply(socket)
        socket.setsockopt(zmq.IPV6, int(addresses.is_ipv6(address)))
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
