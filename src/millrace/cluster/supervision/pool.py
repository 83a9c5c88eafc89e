"""The supervised workers of a run or a server: one pool, one restart policy.

Promise: a replica that dies or hangs is started again, after a wait that doubles with each failure.
One that fails too often ends the run: run() raises RestartLimitExceeded, which says how often it
failed, when, and with which last error. Every restart is reported. Runs on the controller's event
loop; each replica has a supervising task.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn, Self

from millrace.cluster.supervision.replica import Replica
from millrace.cluster.worker import Worker
from millrace.core.errors import (
    MillraceError,
    RestartLimitExceeded,
    RunFailed,
    WorkerError,
    cancel_all,
)

MAX_BACKOFF_S = 60.0
# Only failures in quick succession make the wait longer: a worker that served for a while before
# it died does not wait for deaths that are long past.
BACKOFF_WINDOW_S = 20.0

OnRestart = Callable[[str, str], None]  # name of the replica, what happened and what is done
Launch = Callable[[str, str], Awaitable[Worker]]  # name, module -> a worker that has connected


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    max_restarts: int = 5  # within window_s
    window_s: float = 600.0
    backoff_s: float = 0.5  # before a restart; doubles with each failure within BACKOFF_WINDOW_S
    # False where callers may kill the process or it runs user code: only failed starts count.
    limit_deaths: bool = True
    remedy: str = "It is being restarted."  # ends the report of a restart


@dataclass(eq=False)
class WorkerPool:
    """Use as an async context manager: leaving it ends the supervision, not the processes."""

    launch: Launch
    _: KW_ONLY
    policy: RestartPolicy = RestartPolicy()
    on_restart: OnRestart = lambda *_: None

    def __post_init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await cancel_all(self._tasks.values())

    async def add(self, replica: Replica, *, policy: RestartPolicy | None = None) -> None:
        """Start a replica and supervise it, by default with the policy of the pool. If a signal
        kills it during its first start, it is started again; any other error is raised, as it is
        for the user and a retry would not help."""
        history = RestartHistory(name=replica.name, policy=policy or self.policy)
        await self._start(replica, history, is_restart=False)
        self._replicas[replica.name] = replica
        self._tasks[replica.name] = asyncio.create_task(
            self._supervise(replica, history), name=f"supervise-{replica.name}"
        )

    async def remove(self, name: str) -> None:
        """Stop a replica for good; does nothing if it was never added."""
        if (task := self._tasks.pop(name, None)) is not None:
            await cancel_all([task])
            await self._replicas.pop(name).stop()

    async def run(self) -> NoReturn:
        """Ends only by cancellation, or raises why a replica cannot be restarted."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _supervise(self, replica: Replica, history: "RestartHistory") -> None:
        try:
            while True:
                error = await replica.health()
                delay_s = history.add(error) if history.policy.limit_deaths else 0.0
                self._report(replica, error, history)
                await asyncio.sleep(delay_s)
                await self._start(replica, history, is_restart=True)
        except Exception as error:  # noqa: BLE001 - raised by run()
            replica.give_up(error)
            self._failure = self._failure or error
            self._failed.set()

    async def _start(
        self, replica: Replica, history: "RestartHistory", *, is_restart: bool
    ) -> None:
        while True:
            try:
                return await replica.start(is_restart=is_restart)
            except RunFailed:  # a further attempt would fail as well
                raise
            except (MillraceError, OSError) as error:
                was_killed = isinstance(error, WorkerError) and error.was_killed
                if not (is_restart or was_killed):
                    raise
                delay_s = history.add(error)
                self._report(replica, error, history)
            await asyncio.sleep(delay_s)

    def _report(self, replica: Replica, error: Exception, history: "RestartHistory") -> None:
        self.on_restart(replica.name, f"{error} {history.policy.remedy}")


@dataclass(kw_only=True, eq=False)
class RestartHistory:
    """Recent failures of one supervised process."""

    name: str
    policy: RestartPolicy
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._created_s = self.clock()
        self._recent: deque[float] = deque()  # times of failures, by the clock

    def add(self, error: Exception) -> float:
        """Record a death or a failed start; returns the seconds to wait before the next start.
        Raises RestartLimitExceeded if there were too many within the window."""
        now_s = self.clock()
        self._recent.append(now_s)
        while now_s - self._recent[0] > self.policy.window_s:
            self._recent.popleft()
        if len(self._recent) > self.policy.max_restarts:
            raise self._limit_exceeded(error)
        num_close = sum(now_s - failed_s <= BACKOFF_WINDOW_S for failed_s in self._recent)
        return min(self.policy.backoff_s * 2 ** (num_close - 1), MAX_BACKOFF_S)

    def _limit_exceeded(self, error: Exception) -> RestartLimitExceeded:
        count = "once" if len(self._recent) == 1 else f"{len(self._recent)} times"
        times = ", ".join(f"{at_s - self._created_s:.1f}" for at_s in self._recent)
        return RestartLimitExceeded(
            f"Worker {self.name!r} failed {count} within {self.policy.window_s:g} s"
            f" ({times} s after its first start), more often than supervision.max_restarts ="
            f" {self.policy.max_restarts} allows; the last error: {error}",
            worker=self.name,
            traceback=error.traceback if isinstance(error, WorkerError) else "",
        )
