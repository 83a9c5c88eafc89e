"""How another process asks a running job to change its engines; see control.py for the other end.

Light to import: `millrace engines` needs nothing else.

Lets other processes of the same user change a running job: `millrace engines RUN_DIR`.

The run listens at a Unix socket in a folder that only its user can enter; RUN_DIR/control says
where, while the run lasts. A request and its answer are one line of JSON each.

Promise: whatever is written to the socket costs at most one answer. The server runs on the
controller's event loop.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec

from millrace.cluster.address import MAX_SOCKET_PATH
from millrace.core.errors import ConfigError, MillraceError
from millrace.run.workers import RunWorkers

CONTROL = "control"  # file of a run directory
_ANSWER_BYTES = 2**16


class ScaleRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    add: int = 0  # engines
    remove: tuple[str, ...] = ()  # by name


class ScaleReply(msgspec.Struct, kw_only=True, frozen=True):
    engines: list[str] = []
    error: str = ""  # then nothing else counts


def ask(run_dir: Path, *, add: int = 0, remove: tuple[str, ...] = ()) -> list[str]:
    """Have a running job change its engines; returns the names of those it has then."""
    pointer = run_dir / CONTROL
    wish = ScaleRequest(add=add, remove=remove)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(pointer.read_text().strip())
            connection.sendall(msgspec.json.encode(wish) + b"\n")
            line = connection.makefile("rb").readline(_ANSWER_BYTES)
    except OSError as error:
        raise ConfigError(
            f"No run goes on in {str(run_dir)!r} on this machine ({error.strerror}); name the"
            " folder that its run_dir named."
        ) from None
    if not line:
        raise ConfigError(f"The run in {str(run_dir)!r} ended before it answered.")
    answer = msgspec.json.decode(line, type=ScaleReply)
    if answer.error:
        raise ConfigError(answer.error)
    return answer.engines


_MAX_ADD = 64
_SOCKET = "ctl"  # a path has little room


@contextlib.asynccontextmanager
async def controlled(
    crew: RunWorkers, *, pointer: Path, private: Path, warn: Callable[[str], None]
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


async def _answer(crew: RunWorkers, line: bytes) -> ScaleReply:
    try:
        wish = msgspec.json.decode(line, type=ScaleRequest)
        if not 0 <= wish.add <= _MAX_ADD:
            raise ConfigError(f"--add {wish.add} is not a number from 1 to {_MAX_ADD}.")
        await asyncio.gather(*(crew.add_engine() for _ in range(wish.add)))
        for name in wish.remove:
            await crew.remove_engine(name)
    except (MillraceError, OSError, msgspec.MsgspecError) as error:
        return ScaleReply(error=str(error))
    return ScaleReply(engines=crew.engine_names)
