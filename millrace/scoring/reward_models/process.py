"""The process of one reward model: started, asked, and replaced when it is lost.

Promise: every call ends. A process that dies, or is killed because it does not answer, is replaced
at once; calls that it took with it are made once more.

Runs on the controller's event loop. Calls overlap: the process reads together what has arrived.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Literal

from millrace.cluster.messages import Reading, ReadSteps, StartRewardModel, StepValues
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed, ScoreError, WorkerError
from millrace.scoring.reward_models.settings import ModelSettings

MODULE = "millrace.workers.reward_model"
START_ATTEMPTS = 3  # to replace a lost process

Launch = Callable[[str, str], Awaitable[Worker]]  # name, module -> a process of its own


class ModelProcess:
    def __init__(
        self,
        name: str,
        *,
        start: StartRewardModel,
        launch: Launch,
        start_timeout_s: float,
    ) -> None:
        self.num_lost = 0  # processes that died or were killed, and had to be replaced
        self._name = name
        self._start = start
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._numbers = itertools.count()  # a worker's name is never used twice
        self._coming: asyncio.Task[Worker] | None = None  # done = `current` is asked
        self._current: Worker | None = None
        self._is_closing = False

    async def start(self) -> None:
        self._coming = asyncio.create_task(self._start_worker())
        await asyncio.shield(self._coming)

    async def read(self, readings: Sequence[Reading], *, timeout_s: float) -> list[list[float]]:
        """The values of each reading's steps; raises ScoreError, or RunFailed when no process can
        be had any more."""
        message = ReadSteps(readings=list(readings))
        try:
            values = await self._ask(message, timeout_s=timeout_s)
        except WorkerError:
            try:
                values = await self._ask(message, timeout_s=timeout_s)
            except WorkerError as error:
                failure = ScoreError(f"Reward model {self._name!r} lost its process: {error}")
                failure.add_note(error.traceback)  # or the end of its log
                raise failure from None
        return values

    async def close(self) -> None:
        self._is_closing = True
        if self._coming is None:
            return
        if not self._coming.done():
            self._coming.cancel()
        (outcome,) = await asyncio.gather(self._coming, return_exceptions=True)
        if isinstance(outcome, Worker):
            await outcome.stop()

    async def _ask(self, message: ReadSteps, *, timeout_s: float) -> list[list[float]]:
        assert self._coming is not None, "started before it is asked"
        worker = await asyncio.shield(self._coming)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await worker.call(message)
        except TimeoutError:
            self._lose(worker)
            raise ScoreError(
                f"Reward model {self._name!r} took longer than {timeout_s:g} s; give it less to do"
                " at a time (rollout.max_running_groups), or raise its timeout_s."
            ) from None
        except WorkerError:
            self._lose(worker)
            raise
        assert isinstance(reply, StepValues)
        return reply.values

    def _lose(self, worker: Worker) -> None:
        """Kill the process and start another, unless someone else has noticed before."""
        if self._is_closing or worker is not self._current:
            return
        worker.kill()
        self._current = None
        self.num_lost += 1
        self._coming = asyncio.create_task(self._replace())

    async def _replace(self) -> Worker:
        failure: Exception | None = None
        for _ in range(START_ATTEMPTS):
            try:
                return await self._start_worker()
            except (MillraceError, OSError) as error:
                failure = error
        raise RunFailed(
            f"Reward model {self._name!r} could not be started again: {failure}"
        ) from failure

    async def _start_worker(self) -> Worker:
        worker = await self._launch(f"{self._name}-{next(self._numbers)}", MODULE)
        try:
            await worker.call(self._start, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        self._current = worker
        worker.dead.add_done_callback(lambda _: self._lose(worker))
        return worker


def start_message(
    settings: ModelSettings,
    *,
    head: Literal["sequence", "token"],
    is_whole: bool,
    separator: str | None = None,
    kept_tokens: int = 0,
) -> StartRewardModel:
    """Of what a kind of reward model is told, that which its process is told."""
    shared = {field.name: getattr(settings, field.name) for field in fields(ModelSettings)}
    return StartRewardModel(
        settings=shared,
        head=head,
        is_whole=is_whole,
        separator=separator,
        kept_tokens=kept_tokens,
    )
