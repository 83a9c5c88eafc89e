"""How a worker, or a host that brings some, connects to the hub."""

import zmq

from millrace.cluster import address as addresses
from millrace.cluster.credentials import ClientKeys
from millrace.core.errors import ConfigError


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
