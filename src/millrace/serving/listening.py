"""The socket of an HTTP server, and how long it waits for those who connect.

Promise: a connection on which no request becomes whole within `patience_s` is closed, however its
bytes trickle in; no more than `connections` are open at once, and one more is closed at once.

How often one client may ask: so many requests each second, and a second's worth at once.

Bounds: the newest MAX_CLIENTS are remembered; who was forgotten starts anew. Runs on the server's
loop.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from millrace.serving.options import ServerLimits


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, *, host: str, port: int, limits: ServerLimits | None = None
) -> AsyncIterator[int]:
    """Serve `app` meanwhile; yields the port, which the system chooses if it is 0."""
    limits = limits or ServerLimits()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away ends what it asked for
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=limits.patience_s,  # from the connection on, so for the first head, too
        lingering_time=limits.patience_s,  # for the rest of a body that was refused
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None, "set up"

    def welcome() -> asyncio.Protocol:
        is_full = len(handlers.connections) >= limits.connections
        return _Closed() if is_full else handlers()

    try:
        server = await asyncio.get_running_loop().create_server(welcome, host, port, backlog=1024)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


class _Closed(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


MAX_CLIENTS = 4096


class RateLimit:
    """A bucket for each client, which a request takes one from and time fills."""

    def __init__(self, per_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._room = max(per_s, 1.0)
        self._now_s = now_s
        # client -> what was left, and when; who asked last stands last
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Count a request; 0 = it may pass, else the seconds until one may."""
        now = self._now_s()
        left, since = self._left.pop(client, (self._room, now))
        left = min(self._room, left + (now - since) * self._per_s)
        passes = left >= 1.0
        self._left[client] = (left - 1.0 if passes else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if passes else (1.0 - left) / self._per_s
