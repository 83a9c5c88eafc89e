"""A program as an environment: any that speaks to the OpenAI API, in any language.

It is started once for each episode, finds where the model is in OPENAI_BASE_URL and OPENAI_API_KEY,
and reads its task as one line of JSON from its input. What it says to the model is recorded; what
it does is scored.

Promise: a program that crashes marks its episode and costs no other; one that never calls the model
gives its group no episode, with the reason. None outlives its episode. Runs on the loop of the
environments.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.cluster.process import describe_exit
from millrace.core.errors import TaskError
from millrace.core.records import Task
from millrace.episodes.agent import Agent
from millrace.serving.gateway import Door, Gateway
from millrace.serving.program import ProgramResult, run_program

PROGRAM_TIMEOUT_S = 600.0
_TAIL_CHARS = 4000  # of what a program that crashed had to say


class Blackbox:
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

    async def _played(self, task: Task, agent: Agent, door: Door) -> ProgramResult:
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
