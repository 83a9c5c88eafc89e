"""Lets another process of the same user change the engines of a run: `millrace engines RUN_DIR`.

The run listens at a Unix socket in a folder that only its user can enter; RUN_DIR/control holds the
path of the socket while the run lasts. A request and its reply are one line of JSON each.

Promise: whatever is written to the socket costs at most one reply. The server runs on the
controller's event loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from millrace.core.errors import ConfigError, MillraceError
from millrace.run.workers import RunWorkers

CONTROL = "control"  # file of a run directory
_MAX_REPLY_BYTES = 2**16
_MAX_ADD = 64
_SOCKET = "ctl"  # short, because the path of a socket is limited


class ScaleRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    add: int = 0  # engines
    remove: tuple[str, ...] = ()  # by name


class ScaleReply(msgspec.Struct, kw_only=True, frozen=True):
    engines: list[str] = []
    error: str = ""  # if not empty, the request failed


def ask(run_dir: Path, *, add: int = 0, remove: tuple[str, ...] = ()) -> list[str]:
    """Ask a run to change its engines; returns the names of the engines it has then."""
    pointer = run_dir / CONTROL
    request = ScaleRequest(add=add, remove=remove)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(pointer.read_text().strip())
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline(_MAX_REPLY_BYTES)
    except OSError as error:
        raise ConfigError(
            f"No run is active in {str(run_dir)!r} on this machine ({error.strerror}); give the"
            " run_dir of a run that is active here."
        ) from None
    if not line:
        raise ConfigError(f"The run in {str(run_dir)!r} ended before it answered.")
    reply = msgspec.json.decode(line, type=ScaleReply)
    if reply.error:
        raise ConfigError(reply.error)
    return reply.engines


@contextlib.asynccontextmanager
async def scaling_server(
    workers: RunWorkers, *, pointer: Path, private: Path
) -> AsyncIterator[None]:
    """Serve requests inside the context; the file `pointer` holds the path of the socket."""
    connections: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        try:
            # A client may disconnect, or send a line that is too long: then it gets no reply.
            with contextlib.suppress(ValueError, OSError):
                reply = await _handle(workers, await reader.readline())
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        finally:
            writer.close()
            connections.discard(asyncio.current_task())

    path = private / _SOCKET
    server = await asyncio.start_unix_server(serve, path)
    try:
        pointer.write_text(f"{path}\n")  # noqa: ASYNC240 - a few bytes
        yield
    finally:
        pointer.unlink(missing_ok=True)  # noqa: ASYNC240 - as above
        server.close()
        for connection in connections:
            if connection is not None:
                connection.cancel()


async def _handle(workers: RunWorkers, line: bytes) -> ScaleReply:
    try:
        request = msgspec.json.decode(line, type=ScaleRequest)
        if not 0 <= request.add <= _MAX_ADD:
            raise ConfigError(f"--add {request.add} is not a number from 1 to {_MAX_ADD}.")
        await asyncio.gather(*(workers.add_engine() for _ in range(request.add)))
        for name in request.remove:
            await workers.remove_engine(name)
    except (MillraceError, OSError, msgspec.MsgspecError) as error:
        return ScaleReply(error=str(error))
    return ScaleReply(engines=workers.engine_names)
