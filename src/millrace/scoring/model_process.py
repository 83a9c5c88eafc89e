"""A model in a process of its own: a reward model or a teacher.

Promise: every call ends. A process that dies, or is killed because it does not answer in time, is
restarted by the worker pool; a call that failed with its process is made once more.

Runs on the controller's event loop. Calls overlap: the process batches what has arrived.
"""

import asyncio
import contextlib
from typing import ClassVar, Protocol

from millrace.cluster.messages import Message
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.supervision.replica import WorkerReplica
from millrace.cluster.worker import Worker
from millrace.core.errors import ScoreError, WorkerError


class ModelProcess:
    """A model's process as its scorers call it."""

    ROLE: ClassVar[str]  # in error messages
    MODULE: ClassVar[str]

    def __init__(
        self, name: str, *, start: Message, worker_pool: WorkerPool, start_timeout_s: float
    ) -> None:
        self.name = name
        self._label = f"{self.ROLE} {name!r}"
        self._worker_pool = worker_pool
        self._replica = _ModelReplica(
            f"{name}-0",
            module=self.MODULE,
            start=start,
            worker_pool=worker_pool,
            start_timeout_s=start_timeout_s,
        )

    @property
    def num_lost(self) -> int:
        """Processes that died or were killed."""
        return self._replica.num_deaths

    async def start(self) -> None:
        await self._worker_pool.add(self._replica, limit_deaths=False)

    async def close(self) -> None:
        await self._worker_pool.remove(self._replica.name)

    async def ask(self, message: Message, *, timeout_s: float) -> Message:
        """The reply; raises ScoreError, or RunFailed if the process cannot be restarted."""
        with contextlib.suppress(WorkerError):  # the restart is counted
            return await self._ask(message, timeout_s=timeout_s)
        try:
            return await self._ask(message, timeout_s=timeout_s)
        except WorkerError as error:
            failure = ScoreError(f"{self._label} lost its process twice: {error}")
            failure.add_note(error.traceback)  # or the end of its log
            raise failure from None

    async def send(self, message: Message) -> Message:
        """The reply, without a time limit; raises WorkerError if the process is lost."""
        worker = await self._replica.serving()
        try:
            return await worker.call(message)
        except WorkerError:
            self._replica.drop(worker)
            raise

    async def _ask(self, message: Message, *, timeout_s: float) -> Message:
        worker = await self._replica.serving()
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.call(message)
        except TimeoutError:
            self._replica.drop(worker)
            raise ScoreError(
                f"{self._label} took longer than {timeout_s:g} s; ask it for less at a time"
                " (rollout.max_running_groups), or raise its timeout_s."
            ) from None
        except WorkerError:
            self._replica.drop(worker)  # the process may be alive, or its death not yet reported
            raise


class _ModelReplica(WorkerReplica):
    def __init__(
        self,
        name: str,
        *,
        module: str,
        start: Message,
        worker_pool: WorkerPool,
        start_timeout_s: float,
    ) -> None:
        super().__init__(name)
        self._module = module
        self._start = start
        self._worker_pool = worker_pool
        self._start_timeout_s = start_timeout_s

    async def launch(self, *, is_restart: bool) -> Worker:
        worker = await self._worker_pool.launch(self.name, self._module)
        await worker.start_as(self._start, timeout_s=self._start_timeout_s)
        return worker


class ModelHandle(Protocol):
    """A model that scorers call, in a process here or on another machine."""

    @property
    def num_lost(self) -> int:
        """Processes that had to be replaced."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class ModelScorer:
    """A scorer whose lifetime is that of its model."""

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
