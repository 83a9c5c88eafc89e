"""A program as a subprocess, to its end: what it printed, and how it ended.

Promise: neither it nor what it started in its session outlives the call, however that ends; nor
the process that called, if it is killed. What it prints is bounded. Runs on any event loop.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.leash import leashed

OUTPUT_BYTES = 2**20  # of each stream, the last so many are kept
_LAST_WORDS_S = 1.0  # for what it wrote to come out of the pipes once it has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    exit_code: int  # negative: the signal that ended it
    stdout: str
    stderr: str


async def run_program(
    command: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None
) -> ProgramResult:
    """`env` goes on top of this process's own. "python" is the one that runs this."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    transport, watch = await asyncio.get_running_loop().subprocess_exec(
        _Watch,
        *leashed(command),
        env={**os.environ, "PATH": path, **(env or {})},
        start_new_session=True,  # to be ended with all it has started
    )
    try:
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(stdin.encode())
        pipe.close()  # once that is written; it need not read it
        await watch.exited.wait()
        _kill(transport)  # what it has left behind would keep its pipes open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await watch.silent.wait()
    finally:
        _kill(transport)
        transport.close()
        await watch.exited.wait()  # at once now; the loop may be about to close
    exit_code = transport.get_returncode()
    assert exit_code is not None
    return ProgramResult(exit_code=exit_code, stdout=watch.text(1), stderr=watch.text(2))


class _Watch(asyncio.SubprocessProtocol):
    """Hears of the end of a program also while something it left behind holds its pipes."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()  # and nobody can write to its pipes any more
        self._kept = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] += data
        del self._kept[fd][:-OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.silent.set()

    def text(self, fd: int) -> str:
        return bytes(self._kept[fd]).decode(errors="replace")


def _kill(transport: asyncio.SubprocessTransport) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, all of it
        os.killpg(transport.get_pid(), signal.SIGKILL)
