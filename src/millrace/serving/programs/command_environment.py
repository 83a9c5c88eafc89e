"""A program as a subprocess, to its end: what it printed, and how it ended.

Promise: neither it nor what it started in its session outlives the call, however that ends; nor
the process that called, if it is killed. What it prints is bounded. Runs on any event loop.

A program as an environment: any that speaks to the OpenAI API, in any language.

It is started once for each episode, finds where the model is in OPENAI_BASE_URL and OPENAI_API_KEY,
and reads its task as one line of JSON from its input. What it says to the model is recorded; what
it does is scored.

Promise: a program that crashes marks its episode and costs no other; one that never calls the model
gives its group no episode, with the reason. None outlives its episode. Runs on the loop of the
environments.
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
from millrace.core.errors import TaskError
from millrace.core.records import Task
from millrace.environments.agent import Agent
from millrace.serving.programs.gateway import Gateway, GatewaySession

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
        _ProgramWatch,
        *with_parent_death_signal(command),
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


class _ProgramWatch(asyncio.SubprocessProtocol):
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


PROGRAM_TIMEOUT_S = 600.0
_TAIL_CHARS = 4000  # of what a program that crashed had to say


class CommandEnvironment:
    """An environment function: `environment=Blackbox(["python", "agent.py"], score=...)`."""

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
        """`score` judges what the program did, sync or async; without one that is left to the
        scorers. `columns`: of the task, those that the program is told besides the prompt. No more
        than `max_running` run at once. `log`: where the last words of programs that crash go."""
        self._command = list(command)
        self._score = score
        self._columns = tuple(columns)
        self._timeout_s = timeout_s
        self._log = log
        self._max_running = max_running
        self._places: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that the places belong to
        self._gateway = Gateway()
        self.__name__ = " ".join(self._command)

    async def __call__(self, task: Task, agent: Agent) -> float | None:
        async with self._place(), self._gateway.open(agent) as door:
            result = await self._played(task, agent, door)
        if door.num_calls == 0:
            raise self._never_called(result)
        if result.exit_code != 0:
            self._note_crash(result)
            raise agent.end("crash")
        return await self._scored(task, result)

    def _place(self) -> asyncio.Semaphore:
        """Among those that run; each run's loop has places of its own."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._max_running), loop
        return self._places

    async def _played(self, task: Task, agent: Agent, door: GatewaySession) -> ProgramResult:
        told = {"prompt": task.prompt, **{name: task.columns[name] for name in self._columns}}
        line = json.dumps(told, ensure_ascii=False) + "\n"
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await door.guard(
                    run_program(self._command, stdin=line, env=door.environment)
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise agent.end("timeout") from None

    async def _scored(self, task: Task, result: ProgramResult) -> float | None:
        if self._score is None:
            return None
        if inspect.iscoroutinefunction(self._score):
            return await self._score(task, result)
        return await asyncio.to_thread(self._score, task, result)

    def _never_called(self, result: ProgramResult) -> TaskError:
        last = (result.stderr.strip() or "it said nothing").splitlines()[-1]
        return TaskError(
            f"The program {self.__name__!r} {describe_exit(result.exit_code)} without a call to the"
            f" model ({last:.200}); let it use OPENAI_BASE_URL and OPENAI_API_KEY."
        )

    def _note_crash(self, result: ProgramResult) -> None:
        if self._log is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as file:
            exited = describe_exit(result.exit_code)
            file.write(f"{self.__name__} {exited}\n{result.stderr[-_TAIL_CHARS:]}\n")
