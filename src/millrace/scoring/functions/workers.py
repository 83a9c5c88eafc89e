"""The processes that run reward functions, and the queue of calls for them.

Promise: every call ends. A call that hangs or crashes its process fails alone: the process is
killed and restarted by the worker pool, and calls that shared it run once more, each on a process
of its own, so that a second crash has one culprit.

Runs on the controller's event loop. Calls wait in one queue, in the order of arrival. The callers
bound the queue: each scorer limits its own concurrency.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from millrace.cluster.messages import GroupScored, ScoreGroup, StartScorer
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.supervision.replica import ModuleReplica
from millrace.cluster.worker import Worker
from millrace.core.errors import RunFailed, WorkerError, cancel_all, run_all

MODULE = "millrace.scoring.functions.worker"
CALLS_PER_WORKER = 64  # async calls that share one process
CLOSED = "The scorers are closed; nothing can be scored any more."


@dataclass(eq=False, kw_only=True)
class _ScorerReplica(ModuleReplica):
    num_calls: int = 0  # that its process runs
    is_closed: bool = False  # to further calls: the one that runs is exclusive
    was_shared: bool = False  # by several calls, when the last process was lost

    def detach(self) -> None:
        self.was_shared = self.num_calls > 1


class ScorerWorkers:
    def __init__(
        self, worker_pool: WorkerPool, *, num_workers: int, start_timeout_s: float = 180.0
    ) -> None:
        """`start_timeout_s`: longest time to import the functions."""
        self._worker_pool = worker_pool
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._replicas: list[_ScorerReplica] = []
        self._turn = asyncio.Lock()  # fair: calls are served in the order of arrival
        self._changed = asyncio.Event()  # a slot may be free, or never will be
        self._running: set[asyncio.Task[GroupScored]] = set()
        self._is_closing = False

    async def start(self, functions: Mapping[str, str]) -> None:
        """Start the processes, if there are functions, by location; raises the first error."""
        if not functions:
            return
        self._replicas = [
            _ScorerReplica(
                f"scorer-{i}",
                module=MODULE,
                launcher=self._worker_pool.launch,
                message=StartScorer(functions=dict(functions)),
                start_timeout_s=self._start_timeout_s,
                on_change=self._changed.set,
            )
            for i in range(self._num_workers)
        ]
        # User code may kill its process any number of times: each time costs one group.
        policy = replace(self._worker_pool.policy, limit_deaths=False)
        await run_all(self._worker_pool.add(each, policy=policy) for each in self._replicas)

    async def call(self, message: ScoreGroup, *, exclusive: bool, timeout_s: float) -> GroupScored:
        """Run one function. `exclusive`: on a process that runs nothing else meanwhile. `timeout_s`
        counts from the moment a process is free. Raises the function's own ScoreError,
        TimeoutError, or WorkerError if it crashed its process."""
        replica, worker = await self._take(exclusive=exclusive)
        try:
            return await self._run(replica, worker, message, timeout_s=timeout_s)
        except WorkerError:
            if not replica.was_shared:
                raise
        return await self._run(*await self._take(exclusive=True), message, timeout_s=timeout_s)

    async def close(self) -> None:
        """Stop idle processes, kill busy ones, and wait until all are gone."""
        self._is_closing = True
        self._changed.set()
        for replica in self._replicas:
            if replica.num_calls and (worker := replica.serving_worker):
                worker.kill()
        await cancel_all(self._running)
        await asyncio.gather(*(self._worker_pool.remove(each.name) for each in self._replicas))

    async def _take(self, *, exclusive: bool) -> tuple[_ScorerReplica, Worker]:
        """Wait for a process that is free; raises RunFailed if there will be none."""
        async with self._turn:
            self._check_open()
            while (free := self._free(exclusive=exclusive)) is None:
                self._changed.clear()
                await self._changed.wait()
                self._check_open()
            free[0].num_calls += 1
            free[0].is_closed = exclusive
            return free

    def _check_open(self) -> None:
        if self._is_closing:
            raise RunFailed(CLOSED)
        failures = [replica.given_up for replica in self._replicas]
        if failures and None not in failures:
            raise RunFailed(f"No scorer process is left: {failures[-1]}")

    def _free(self, *, exclusive: bool) -> tuple[_ScorerReplica, Worker] | None:
        # Async calls crowd together, so that whole processes stay free for sync functions.
        serving = [(each, worker) for each in self._replicas if (worker := each.serving_worker)]
        for replica, worker in () if exclusive else serving:
            if 0 < replica.num_calls < CALLS_PER_WORKER and not replica.is_closed:
                return replica, worker
        return next((pair for pair in serving if pair[0].num_calls == 0), None)

    async def _run(
        self, replica: _ScorerReplica, worker: Worker, message: ScoreGroup, *, timeout_s: float
    ) -> GroupScored:
        """Make the call in a task: the process runs on even if the caller is cancelled."""
        running = asyncio.create_task(self._call(replica, worker, message, timeout_s=timeout_s))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise RunFailed(CLOSED) from None
            raise

    async def _call(
        self, replica: _ScorerReplica, worker: Worker, message: ScoreGroup, *, timeout_s: float
    ) -> GroupScored:
        try:
            async with asyncio.timeout(timeout_s):
                scored = await worker.call(message)
        except (TimeoutError, WorkerError):
            # A hung function cannot be interrupted, and an async one may ignore cancellation.
            replica.drop(worker)
            raise
        finally:
            replica.num_calls -= 1
            self._changed.set()
        assert isinstance(scored, GroupScored)
        return scored
