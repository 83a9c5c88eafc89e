"""Changes the number of engines of a run: `millrace engines RUN_DIR`, and engine.max_count.

For the command of another process of the same user, the run listens at a Unix socket in a folder
that only its user can enter; RUN_DIR/control holds the path of the socket while the run lasts. A
request and its reply are one line of JSON each. Promise: whatever is written to the socket costs at
most one reply.

With engine.max_count, the run adds engines while the trainer waits for batches, and removes them
while batches wait for it. Promise: it removes only engines that it added, none below the number
that the run started with, and adds none above engine.max_count. Every change is reported with its
reason. If an engine cannot be added, the run continues, and tries again ten minutes later. Both run
on the controller's event loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import msgspec

from millrace.controller.controller import Controller
from millrace.core.errors import ConfigError, MillraceError
from millrace.run.workers import RunWorkers

CONTROL = "control"  # file of a run directory
_MAX_REPLY_BYTES = 2**16
_MAX_ADD = 64
_SOCKET = "ctl"  # short, because the path of a socket is limited

Load = Literal["trainer waits", "batches wait", "balanced"]

SAMPLE_S = 0.25
WINDOW_S = 30.0  # between two decisions; an engine needs some of it to start
WAITING_SHARE = 0.3  # of the window in which the trainer waits, for one more engine
RETRY_WINDOWS = 20  # until an addition that failed is tried again
SURPLUS_SHARE = 0.9  # of the window in which a whole batch waits, for one engine fewer


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
    before = [*workers.engine_names]
    try:
        request = msgspec.json.decode(line, type=ScaleRequest)
        if not 0 <= request.add <= _MAX_ADD:
            raise ConfigError(f"--add {request.add} is not a number from 1 to {_MAX_ADD}.")
        adding = [asyncio.create_task(workers.add_engine()) for _ in range(request.add)]
        await asyncio.gather(*adding, return_exceptions=True)  # the reply says how all have ended
        for task in adding:
            task.result()
        for name in request.remove:
            await workers.remove_engine(name)
    except (MillraceError, OSError, msgspec.MsgspecError) as error:
        names = workers.engine_names
        now = "" if names == before else f" The engines of the run are now {', '.join(names)}."
        return ScaleReply(error=f"{str(error).rstrip('.')}.{now}")
    return ScaleReply(engines=workers.engine_names)


def change(window: list[Load]) -> int:
    """Engines to add after a window of samples; negative = remove."""
    if window.count("trainer waits") > WAITING_SHARE * len(window):
        return 1
    return -1 if window.count("batches wait") > SURPLUS_SHARE * len(window) else 0


async def autoscale(
    workers: RunWorkers, controller: Controller, *, report: Callable[[str], None]
) -> None:
    """Scale the engines of a run until cancelled, if engine.max_count is set."""
    config = controller.config

    def load() -> Load:
        if controller.state.awaits_batch:
            return "trainer waits"
        has_batch = controller.dispatcher.buffer.depth >= config.trainer.groups_per_step
        return "batches wait" if has_batch else "balanced"

    least, most = config.engine.num_local + config.engine.remote, config.engine.max_count
    if most is not None:
        await follow_load(workers, load, min_engines=least, max_engines=most, report=report)


async def follow_load(
    workers: RunWorkers,
    load: Callable[[], Load],
    *,
    min_engines: int,
    max_engines: int,
    report: Callable[[str], None],
    window_s: float = WINDOW_S,
) -> None:
    added: list[str] = []
    resting = 0  # windows in which no engine is added
    while True:
        window: list[Load] = []
        for _ in range(max(1, round(window_s / SAMPLE_S))):
            await asyncio.sleep(min(SAMPLE_S, window_s))
            window.append(load())
        wanted, names, resting = change(window), workers.engine_names, resting - 1
        added = [name for name in added if name in names]  # `millrace engines` may remove some
        if wanted > 0 and len(names) < max_engines and resting <= 0:
            share = window.count("trainer waits") / len(window)
            report(f"The trainer waited for {share:.0%} of {window_s:g} s: adding an engine.")
            try:
                added.append(await workers.add_engine())
            except (MillraceError, OSError) as error:
                resting = RETRY_WINDOWS
                report(f"No engine could be added, so {len(names)} remain: {error}")
        elif wanted < 0 and added and len(names) > min_engines:
            report(f"Whole batches waited for the trainer: removing {added[-1]}.")
            await workers.remove_engine(added.pop())
