"""Lets other processes of the same user change a running job: `millrace engines RUN_DIR`.

The run listens at a Unix socket in a folder that only its user can enter; RUN_DIR/control says
where, while the run lasts. A request and its answer are one line of JSON each.

Promise: whatever is written to the socket costs at most one answer. The server runs on the
controller's event loop.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec

from millrace.cluster.address import MAX_SOCKET_PATH
from millrace.core.errors import ConfigError, MillraceError
from millrace.crew.asking import Answer, Wish
from millrace.crew.crew import Crew

_MAX_ADD = 64
_SOCKET = "ctl"  # a path has little room


@contextlib.asynccontextmanager
async def controlled(
    crew: Crew, *, pointer: Path, private: Path, warn: Callable[[str], None]
) -> AsyncIterator[None]:
    """While inside, engines can be added and removed from elsewhere; `pointer` says where."""
    visits: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.add(asyncio.current_task())
        try:
            # It may send no line of a decent length, or leave: then there is nobody to answer.
            with contextlib.suppress(ValueError, OSError):
                answer = await _answer(crew, await reader.readline())
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        finally:
            writer.close()
            visits.discard(asyncio.current_task())

    path = private / _SOCKET
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        warn(
            f"Engines cannot be added or removed while this run goes on: the path of its socket,"
            f" {str(path)!r}, is too long; set TMPDIR to a shorter folder."
        )
        yield
        return
    server = await asyncio.start_unix_server(serve, path)
    try:
        with _pointing(pointer, path):
            yield
    finally:
        server.close()
        for visit in visits:
            if visit is not None:
                visit.cancel()


@contextlib.contextmanager
def _pointing(pointer: Path, path: Path) -> Iterator[None]:
    pointer.write_text(f"{path}\n")
    try:
        yield
    finally:
        pointer.unlink(missing_ok=True)


async def _answer(crew: Crew, line: bytes) -> Answer:
    try:
        wish = msgspec.json.decode(line, type=Wish)
        if not 0 <= wish.add <= _MAX_ADD:
            raise ConfigError(f"--add {wish.add} is not a number from 1 to {_MAX_ADD}.")
        await asyncio.gather(*(crew.add_engine() for _ in range(wish.add)))
        for name in wish.remove:
            await crew.remove_engine(name)
    except (MillraceError, OSError, msgspec.MsgspecError) as error:
        return Answer(error=str(error))
    return Answer(engines=crew.engine_names)
