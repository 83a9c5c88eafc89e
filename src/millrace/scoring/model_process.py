"""A model in a process of its own, as the controller sees it: started, asked, replaced when lost.

Promise: every call ends. A process that dies, or is killed because it does not answer, is replaced
at once; calls that it took with it are made once more.

Runs on the controller's event loop. Calls overlap: the process reads together what has arrived.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import ClassVar, Protocol

from millrace.cluster.messages import Message
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed, ScoreError, WorkerError

START_ATTEMPTS = 3  # to replace a lost process

Launch = Callable[[str, str], Awaitable[Worker]]  # name, module -> a process of its own


class ModelProcess:
    ROLE: ClassVar[str]  # what it is called in messages
    MODULE: ClassVar[str]

    def __init__(
        self,
        name: str,
        *,
        start: Message,
        launch: Launch,
        start_timeout_s: float,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`warn` is told of the first loss."""
        self.name = name
        self.num_lost = 0  # processes that died or were killed, and had to be replaced
        self._label = f"{self.ROLE} {name!r}"
        self._start = start
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._warn = warn
        self._numbers = itertools.count()  # a worker's name is never used twice
        self._coming: asyncio.Task[Worker] | None = None  # done = that worker is asked
        self._current: Worker | None = None
        self._is_closing = False

    async def start(self) -> None:
        self._coming = asyncio.create_task(self._start_worker())
        await asyncio.shield(self._coming)

    async def close(self) -> None:
        self._is_closing = True
        if self._coming is None:
            return
        self._coming.cancel()
        (outcome,) = await asyncio.gather(self._coming, return_exceptions=True)
        if isinstance(outcome, Worker):
            await outcome.stop()

    async def ask(self, message: Message, *, timeout_s: float) -> Message:
        """The reply; raises ScoreError, or RunFailed where asking again would be no use."""
        with contextlib.suppress(WorkerError):  # it is replaced, and counted
            return await self._ask(message, timeout_s=timeout_s)
        try:
            return await self._ask(message, timeout_s=timeout_s)
        except WorkerError as error:
            failure = ScoreError(f"{self._label} lost its process twice: {error}")
            failure.add_note(error.traceback)  # or the end of its log
            raise failure from None

    async def tell(self, message: Message) -> Message:
        """The reply, however long it takes; raises WorkerError if the process is lost."""
        worker = await self._worker()
        try:
            return await worker.call(message)
        except WorkerError as error:
            self._lose(worker, error)
            raise

    async def _worker(self) -> Worker:
        assert self._coming is not None, "started before it is asked"
        return await asyncio.shield(self._coming)

    async def _ask(self, message: Message, *, timeout_s: float) -> Message:
        worker = await self._worker()
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.call(message)
        except TimeoutError:
            slow = ScoreError(
                f"{self._label} took longer than {timeout_s:g} s; ask it for less at a time"
                " (rollout.max_running_groups), or raise its timeout_s."
            )
            self._lose(worker, slow)
            raise slow from None
        except WorkerError as error:
            self._lose(worker, error)  # the news of its death may come later than this
            raise

    def _lose(self, worker: Worker, reason: Exception) -> None:
        """Start another, unless someone else has noticed before."""
        if self._is_closing or worker is not self._current:
            return
        worker.kill()  # it may live, and have failed at what it was asked
        self._current = None
        self.num_lost += 1
        if self.num_lost == 1:
            self._warn(f"a process is replaced (further times are only counted): {reason}")
        self._coming = asyncio.create_task(self._replace())

    async def _replace(self) -> Worker:
        failure: Exception | None = None
        for _ in range(START_ATTEMPTS):
            try:
                return await self._start_worker()
            except (MillraceError, OSError) as error:
                failure = error
        raise RunFailed(f"{self._label} could not be started again: {failure}") from failure

    async def _start_worker(self) -> Worker:
        worker = await self._launch(f"{self.name}-{next(self._numbers)}", self.MODULE)
        try:
            await worker.call(self._start, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        self._current = worker
        worker.dead.add_done_callback(lambda dead: self._lose(worker, dead.result()))
        return worker


class ModelHandle(Protocol):
    """A model that scorers ask, wherever it is."""

    num_lost: int  # processes that had to be replaced

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class ModelScorer:
    """A scorer that is started, ended and lost with the model it asks."""

    def __init__(self, name: str, model: ModelHandle, *, weight: float) -> None:
        self.name = name
        self.weight = weight
        self._model = model

    @property
    def num_lost(self) -> int:
        return self._model.num_lost

    async def start(self) -> None:
        await self._model.start()

    async def close(self) -> None:
        await self._model.close()
