"""A model in a process of its own: a reward model or a teacher.

Promise: every call ends. A process that dies, or is killed because it does not answer in time, is
restarted by the worker pool; a call that failed with its process is made once more.

Runs on the controller's event loop. Calls overlap: the process batches what has arrived.
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Protocol, TypeVar

from millrace.cluster.messages import Message
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.supervision.replica import ModuleReplica
from millrace.core.errors import ScoreError, WorkerError
from millrace.core.protocols import RestartingScorer, StartableScorer
from millrace.scoring.scorer_type import CallSettings

# No retries: a sequence that the model cannot read fails again, and the pool restarts the process.
MODEL_CALLS = CallSettings(timeout_s=300.0, concurrency=1024, retries=0, breaker_failures=0)


class ModelProcess:
    ROLE: ClassVar[str]  # in error messages
    MODULE: ClassVar[str]

    def __init__(
        self, name: str, *, start: Message, worker_pool: WorkerPool, start_timeout_s: float
    ) -> None:
        self.name = name
        self._worker_pool = worker_pool
        self._replica = ModuleReplica(
            f"{name}-0",
            module=self.MODULE,
            message=start,
            launcher=worker_pool.launch,
            start_timeout_s=start_timeout_s,
        )

    @property
    def num_lost(self) -> int:
        """Processes that died or were killed."""
        return self._replica.num_deaths

    async def start(self) -> None:
        policy = replace(self._worker_pool.policy, limit_deaths=False)
        await self._worker_pool.add(self._replica, policy=policy)

    async def close(self) -> None:
        await self._worker_pool.remove(self._replica.name)

    async def ask(self, message: Message, *, timeout_s: float) -> Message:
        """The reply; raises ScoreError, or RunFailed if the process cannot be restarted."""
        with contextlib.suppress(WorkerError):  # the restart is counted
            return await self.ask_once(message, timeout_s=timeout_s)
        try:
            return await self.ask_once(message, timeout_s=timeout_s)
        except WorkerError as error:
            failure = ScoreError(f"{self.ROLE} {self.name!r} lost its process twice: {error}")
            failure.add_note(error.traceback)  # or the end of its log
            raise failure from None

    async def ask_once(self, message: Message, *, timeout_s: float | None) -> Message:
        """Ask without a retry: raises WorkerError if the process is lost."""
        worker = await self._replica.serving()
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.call(message)
        except TimeoutError:
            self._replica.drop(worker)
            raise ScoreError(
                f"{self.ROLE} {self.name!r} took longer than {timeout_s:g} s; ask it for less at a"
                " time (rollout.max_running_groups), or raise its timeout_s."
            ) from None
        except WorkerError:
            self._replica.drop(worker)  # the process may be alive, or its death not yet reported
            raise


class ModelHandle(StartableScorer, RestartingScorer, Protocol):
    """A model that scorers call, in a process here or on another machine."""


Model = TypeVar("Model", bound=ModelHandle)


@dataclass(kw_only=True, eq=False)
class ModelScorer(Generic[Model]):
    """A scorer whose lifetime is that of its model."""

    name: str
    weight: float
    model: Model

    @property
    def num_lost(self) -> int:
        return self.model.num_lost

    async def start(self) -> None:
        await self.model.start()

    async def close(self) -> None:
        await self.model.close()
