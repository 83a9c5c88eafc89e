"""Programs as environments: any program that uses the OpenAI API, in any language.

A program is started once per episode. It finds the model at OPENAI_BASE_URL with OPENAI_API_KEY,
and reads its task as one line of JSON from standard input. Its output and exit code are scored.

Promise: a program that crashes marks its own episode only. A program that never calls the model
fails its group with the reason. No program outlives its episode, nor the process that started it,
even if that is killed. The kept output is bounded. Runs on the event loop of the environments.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.cluster.process import describe_exit
from millrace.core.errors import TaskError, printable
from millrace.core.records import Task
from millrace.environments.agent import Agent
from millrace.serving.programs.gateway import Gateway, GatewaySession

OUTPUT_BYTES = 2**20  # kept from the end of each stream
_DRAIN_S = 1.0  # longest wait for buffered output after the exit


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    exit_code: int  # negative = killed by that signal
    stdout: str
    stderr: str


async def run_program(
    command: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None
) -> ProgramResult:
    """Run a program to its end. `env` extends the environment of this process; "python" is this
    interpreter."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    transport, collector = await asyncio.get_running_loop().subprocess_exec(
        _OutputCollector,
        *with_parent_death_signal(command),
        env={**os.environ, "PATH": path, **(env or {})},
        start_new_session=True,  # so that its whole process group can be killed
    )
    try:
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(stdin.encode())
        pipe.close()  # after the data is written; the program may ignore it
        await collector.exited.wait()
        _kill(transport)  # child processes would keep its pipes open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await collector.drained.wait()
    finally:
        _kill(transport)
        # Before close(), which would take the exit code from the event loop.
        await collector.exited.wait()
        transport.close()
    exit_code = transport.get_returncode()
    assert exit_code is not None
    return ProgramResult(exit_code=exit_code, stdout=collector.text(1), stderr=collector.text(2))


class _OutputCollector(asyncio.SubprocessProtocol):
    """Collects output and notices the exit even if child processes hold the pipes open."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()  # all pipes are closed
        self._kept = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] += data
        del self._kept[fd][:-OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drained.set()

    def text(self, fd: int) -> str:
        return bytes(self._kept[fd]).decode(errors="replace")


def _kill(transport: asyncio.SubprocessTransport) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the process group has ended
        os.killpg(transport.get_pid(), signal.SIGKILL)


PROGRAM_TIMEOUT_S = 600.0
_TAIL_CHARS = 4000  # of stderr in the log of crashes


class CommandEnvironment:
    """An environment that starts a program for each episode, which calls the model over HTTP:
    `environment=CommandEnvironment(["python", "agent.py"])`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        score: Callable[[Task, ProgramResult], Any] | None = None,
        columns: Sequence[str] = (),
        timeout_s: float = PROGRAM_TIMEOUT_S,
        max_running: int = 32,
        log: Path | None = None,
    ) -> None:
        """`score`, a function or coroutine function, rewards the result of the program; None leaves
        that to the scorers. `columns`: task columns that are sent with the prompt. `max_running`
        bounds the concurrent programs. `log`: file for the stderr of programs that crash."""
        self._command = list(command)
        self._score = score
        self._columns = tuple(columns)
        self._timeout_s = timeout_s
        self._log = log
        self._max_running = max_running
        # Slots of programs, in the event loop that used the environment last.
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._gateway = Gateway()
        self.__name__ = " ".join(self._command)

    async def __call__(self, task: Task, agent: Agent) -> float | None:
        async with self._slot(), self._gateway.open(agent) as session:
            result = await self._run(task, agent, session)
        exited = describe_exit(result.exit_code)
        if session.num_calls == 0:
            last = (result.stderr.strip() or "no output on stderr").splitlines()[-1]
            raise TaskError(
                f"The program {self.__name__!r} {exited} without calling the model ({last:.200});"
                " make it use OPENAI_BASE_URL and OPENAI_API_KEY."
            )
        if result.exit_code != 0:
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                said = f"{self.__name__} {exited}\n{result.stderr[-_TAIL_CHARS:]}\n"
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(printable(said))
            raise agent.end("crash")
        if self._score is None:
            return None
        if inspect.iscoroutinefunction(self._score):
            return await self._score(task, result)
        return await asyncio.to_thread(self._score, task, result)

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._max_running)
        return self._slots[1]

    async def _run(self, task: Task, agent: Agent, session: GatewaySession) -> ProgramResult:
        payload = {"prompt": task.prompt, **{name: task.columns[name] for name in self._columns}}
        line = json.dumps(payload, ensure_ascii=False) + "\n"
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await session.guard(
                    run_program(self._command, stdin=line, env=session.environment)
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise agent.end("timeout") from None
