"""One teacher process as the controller sees it: started, asked, brought new weights.

Promise: every call ends. A teacher that never changes is replaced when its process is lost, and
what was asked of it is asked once more; the past that one of another kind has learned is lost with
it, which ends the run.

Runs on the controller's event loop. Calls overlap: the process reads together what has arrived.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from millrace.cluster.messages import ScoreTokens, StartTeacher, Swap, Swapped, TokensScored
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed, ScoreError, WorkerError
from millrace.core.passages import Likelihoods, Passage
from millrace.core.weight_update import WeightUpdate

MODULE = "millrace.workers.teacher"
START_ATTEMPTS = 3  # to replace a lost process

Launch = Callable[[str, str], Awaitable[Worker]]  # name, module -> a process of its own


class TeacherProcess:
    def __init__(
        self, name: str, *, start: StartTeacher, launch: Launch, start_timeout_s: float
    ) -> None:
        self.name = name
        self.num_lost = 0  # processes that died or were killed, and had to be replaced
        self._start = start
        self._launch = launch
        self._start_timeout_s = start_timeout_s
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

    async def ask(self, passages: Sequence[Passage], *, timeout_s: float) -> list[Likelihoods]:
        """Raises ScoreError, or RunFailed where asking again would be no use."""
        message = ScoreTokens(passages=list(passages))
        try:
            return await self._ask(message, timeout_s=timeout_s)
        except WorkerError as error:
            if self._follows:
                raise RunFailed(
                    f"Teacher {self.name!r} follows the policy, and what it knew of its past is"
                    f" lost: {error} Resume the run from its last checkpoint."
                ) from error
        try:
            return await self._ask(message, timeout_s=timeout_s)
        except WorkerError as error:
            failure = ScoreError(f"Teacher {self.name!r} lost its process twice: {error}")
            failure.add_note(error.traceback)  # or the end of its log
            raise failure from None

    async def swap(self, update: WeightUpdate) -> int:
        """Returns the version it holds now; the bytes of this one are not needed any more."""
        assert self._coming is not None, "started before it follows"
        worker = await asyncio.shield(self._coming)
        reply = await worker.call(Swap(update=update))
        assert isinstance(reply, Swapped)
        return reply.version

    @property
    def _follows(self) -> bool:
        return self._start.following is not None

    async def _ask(self, message: ScoreTokens, *, timeout_s: float) -> list[Likelihoods]:
        assert self._coming is not None, "started before it is asked"
        worker = await asyncio.shield(self._coming)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await worker.call(message)
        except TimeoutError:
            raise ScoreError(
                f"Teacher {self.name!r} took longer than {timeout_s:g} s; ask it for less at a time"
                " (rollout.max_running_groups), or raise its timeout_s."
            ) from None
        except WorkerError:
            self._lose(worker)  # the news of its death may come later than this
            raise
        assert isinstance(reply, TokensScored)
        return reply.likelihoods

    def _lose(self, worker: Worker) -> None:
        """Start another, if it would be as good; unless someone else has noticed before."""
        if self._is_closing or self._follows or worker is not self._current:
            return
        worker.kill()  # it may live, and have failed at what it was asked
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
        raise RunFailed(f"Teacher {self.name!r} could not be started again: {failure}")

    async def _start_worker(self) -> Worker:
        worker = await self._launch(f"{self.name}-{next(self._numbers)}", MODULE)
        try:
            await worker.call(self._start, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        self._current = worker
        worker.dead.add_done_callback(lambda _: self._lose(worker))
        return worker
