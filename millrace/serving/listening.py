"""The socket of an HTTP server, and how long it waits for those who connect.

Promise: a connection on which no request becomes whole within `patience_s` is closed, however its
bytes trickle in; no more than `connections` are open at once, and one more is closed at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from millrace.serving.options import Limits


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, *, host: str, port: int, limits: Limits | None = None
) -> AsyncIterator[int]:
    """Serve `app` meanwhile; yields the port, which the system chooses if it is 0."""
    limits = limits or Limits()
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
