"""The listening socket of an HTTP server, and the limits on its clients.

Promise: a connection that does not deliver a complete request within `timeout_s` is closed. At
most `connections` are open at a time; further ones are closed at once. RateLimit bounds the
requests per second of one client.

Runs on the server's event loop.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from millrace.core.errors import ConfigError
from millrace.serving.options import ServerLimits


@contextlib.asynccontextmanager
async def http_listener(
    app: web.Application, *, host: str, port: int, limits: ServerLimits | None = None
) -> AsyncIterator[int]:
    """Serve `app` inside the context; yields the port, which the system chooses for port 0."""
    limits = limits or ServerLimits()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a disconnected client cancels its request
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=limits.timeout_s,  # also limits the headers of the first request
        lingering_time=limits.timeout_s,  # for the rest of a refused body
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def accept() -> asyncio.Protocol:
        is_full = len(handlers.connections) >= limits.connections
        return _RefusedConnection() if is_full else handlers()

    try:
        try:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(accept, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen at host {host}, port {port}: {error}; choose others."
            ) from None
        with contextlib.closing(server):
            yield server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


MAX_CLIENTS = 4096  # whose requests are counted; the least recent are dropped


class RateLimit:
    """A token bucket per client, with room for the requests of one second."""

    def __init__(self, per_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._capacity = max(per_s, 1.0)
        self._now_s = now_s
        # client -> tokens left, and since when; the most recent client is last
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Count a request. Returns 0 if it may pass, otherwise the seconds until it may."""
        now = self._now_s()
        left, since = self._left.pop(client, (self._capacity, now))
        left = min(self._capacity, left + (now - since) * self._per_s)
        passes = left >= 1.0
        self._left[client] = (left - 1.0 if passes else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if passes else (1.0 - left) / self._per_s
