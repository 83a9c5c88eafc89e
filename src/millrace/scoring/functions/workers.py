"""The processes that run reward functions: who is free, who is lost, who takes their place.

Promise: every call ends. One that hangs or brings its worker down costs itself alone: the worker is
killed and replaced in the background, and calls that shared it are run once more, each on a worker
of its own, so that a second loss has one culprit.

Runs on the controller's event loop. Calls wait for a worker in one line, by priority and then first
come, first served; the line is bounded by its callers: each scorer's own concurrency.
"""

import asyncio
import bisect
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.cluster.messages import GroupScored, ScoreGroup, StartScorer
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed, WorkerError

CALLS_PER_WORKER = 64  # async calls that share one worker
START_ATTEMPTS = 3  # for one worker that is killed, or that replaces a lost one
CLOSED = "The scorers are closed; nothing can be scored any more."

Launch = Callable[[str], Awaitable[Worker]]  # name -> a running scorer process


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call in the line."""

    granted: "asyncio.Future[_WorkerSlot]"
    alone: bool
    priority: int


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """One worker, and the calls it runs."""

    worker: Worker
    num_calls: int = 0
    is_closed: bool = False  # to further calls: the one that runs wants it alone
    was_shared: bool = False  # at the moment it was lost


class ScorerWorkers:
    def __init__(
        self,
        *,
        launch: Launch,
        num_workers: int,
        start_timeout_s: float = 180.0,
    ) -> None:
        self.num_lost = 0  # workers that died or were killed, and had to be replaced
        self._launch = launch
        self._num_workers = num_workers
        self._functions: dict[str, str] = {}
        self._start_timeout_s = start_timeout_s  # to import the functions
        self._numbers = itertools.count()  # a name is never used twice
        self._slots: list[_WorkerSlot] = []
        self._line: list[_Waiting] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._num_starting = 0
        self._last_failure: Exception | None = None
        self._is_closing = False

    @property
    def num_busy(self) -> int:
        return sum(slot.num_calls > 0 for slot in self._slots)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a free worker."""
        return sum(not waiting.granted.done() for waiting in self._line)

    async def start(self, functions: Mapping[str, str]) -> None:
        """Bring up all workers, or none where there is no function; raises what the first one that
        fails says. `functions`: name -> where a scorer process finds it, see handover.py."""
        self._functions = dict(functions)
        if not functions:
            return
        starts = [self._start_first() for _ in range(self._num_workers)]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                self._add(outcome)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def call(
        self, message: ScoreGroup, *, alone: bool, timeout_s: float, priority: int = 0
    ) -> GroupScored:
        """Run one function. `alone`: on a worker that runs nothing else meanwhile.

        `timeout_s` counts from the moment a worker is free. Raises the function's own ScoreError,
        TimeoutError, or WorkerError if it brought its worker down.
        """
        slot = await self._take(alone=alone, priority=priority)
        try:
            return await self._run(slot, message, timeout_s=timeout_s)
        except WorkerError:
            if not slot.was_shared:
                raise
        slot = await self._take(alone=True, priority=priority)
        return await self._run(slot, message, timeout_s=timeout_s)

    async def close(self) -> None:
        """Stop idle workers, kill busy ones, and wait until all are gone."""
        self._is_closing = True
        self._refuse_line(RunFailed(CLOSED))
        for slot in self._slots:
            if slot.num_calls:
                slot.worker.kill()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(slot.worker.stop() for slot in self._slots))
        self._slots.clear()

    async def _take(self, *, alone: bool, priority: int) -> _WorkerSlot:
        if self._is_closing:
            raise RunFailed(CLOSED)
        if self._has_none_left:
            raise self._none_left()
        granted: asyncio.Future[_WorkerSlot] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(granted, alone, priority)
        bisect.insort_right(self._line, waiting, key=lambda other: -other.priority)
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # both happened in one turn of the loop
                self._give_back(granted.result())
            raise

    def _grant(self) -> None:
        """Serve the line from its head, as far as workers go."""
        while self._line:
            first = self._line[0]
            if not first.granted.done():
                slot = self._free_slot(alone=first.alone)
                if slot is None:
                    return
                slot.num_calls += 1
                slot.is_closed = first.alone
                first.granted.set_result(slot)
            self._line.pop(0)

    def _free_slot(self, *, alone: bool) -> _WorkerSlot | None:
        # Async calls crowd together, so that whole workers stay free for sync functions.
        idle = next((slot for slot in self._slots if slot.num_calls == 0), None)
        if alone:
            return idle
        for slot in self._slots:
            if 0 < slot.num_calls < CALLS_PER_WORKER and not slot.is_closed:
                return slot
        return idle

    def _give_back(self, slot: _WorkerSlot) -> None:
        slot.num_calls -= 1
        self._grant()

    async def _run(
        self, slot: _WorkerSlot, message: ScoreGroup, *, timeout_s: float
    ) -> GroupScored:
        """The call, as a task: the caller may be cancelled, but the worker runs on regardless."""
        running = self._spawn(self._call(slot, message, timeout_s=timeout_s))
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.add_done_callback(_disregard)
            raise
        if running.cancelled():
            raise RunFailed(CLOSED)
        return running.result()

    async def _call(
        self, slot: _WorkerSlot, message: ScoreGroup, *, timeout_s: float
    ) -> GroupScored:
        try:
            async with asyncio.timeout(timeout_s):
                scored = await slot.worker.call(message)
        except (TimeoutError, WorkerError):
            # A hung function cannot be interrupted, and an async one may ignore being cancelled.
            self._lose(slot)
            raise
        finally:
            self._give_back(slot)
        assert isinstance(scored, GroupScored)
        return scored

    def _add(self, worker: Worker) -> None:
        slot = _WorkerSlot(worker)
        self._slots.append(slot)
        worker.dead.add_done_callback(lambda _: self._lose(slot))
        self._grant()

    def _lose(self, slot: _WorkerSlot) -> None:
        """Kill the worker and start another. Its other calls learn it from its death."""
        if self._is_closing or slot not in self._slots:
            return
        self._slots.remove(slot)
        slot.was_shared = slot.num_calls > 1
        slot.worker.kill()
        self.num_lost += 1
        self._num_starting += 1
        self._spawn(self._replace())

    async def _replace(self) -> None:
        try:
            for _ in range(START_ATTEMPTS):
                try:
                    return self._add(await self._start_worker())
                except (MillraceError, OSError) as error:
                    self._last_failure = error
        finally:
            self._num_starting -= 1
            if self._has_none_left:
                self._refuse_line(self._none_left())

    async def _start_first(self) -> Worker:
        """One that is killed meanwhile is started again; what it says itself is for the user."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await self._start_worker()
            except WorkerError as error:
                if not error.was_killed:
                    raise
        return await self._start_worker()

    async def _start_worker(self) -> Worker:
        worker = await self._launch(f"scorer-{next(self._numbers)}")
        try:
            start = StartScorer(functions=self._functions)
            await worker.call(start, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def _has_none_left(self) -> bool:
        return not self._slots and self._num_starting == 0

    def _none_left(self) -> RunFailed:
        return RunFailed(f"No scorer process is left: {self._last_failure}")

    def _refuse_line(self, error: MillraceError) -> None:
        for waiting in self._line:
            if not waiting.granted.done():
                waiting.granted.set_exception(error)
        self._line.clear()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _disregard(task: asyncio.Task[GroupScored]) -> None:
    """Look at the outcome of a call whose caller is gone, or asyncio warns that nobody did."""
    if not task.cancelled():
        task.exception()
