"""The supervised workers of a run or a server: one pool, one restart policy.

Promise: a replica that dies or hangs is started again, after a wait that doubles with each failure.
One that fails too often ends the run: run() raises RestartLimitExceeded, which says how often it
failed, when, and with which last error. Every restart is counted and reported.

Runs on the controller's event loop; each replica has a supervising task.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NoReturn, Self

from millrace.cluster.supervision.replica import Replica
from millrace.cluster.supervision.restarts import RestartHistory, RestartPolicy
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed, WorkerError

RESTARTING = "It is being restarted."

OnRestart = Callable[[str, str], None]  # name of the replica, what happened and what is done
Launch = Callable[[str, str], Awaitable[Worker]]  # name, module -> a worker that has connected


class WorkerPool:
    """Use as an async context manager: leaving it ends the supervision, not the processes."""

    def __init__(
        self,
        launch: Launch,
        *,
        policy: RestartPolicy | None = None,
        on_restart: OnRestart = lambda *_: None,
    ) -> None:
        self.launch = launch
        self.restarts: Counter[str] = Counter()  # by replica
        self._policy = policy or RestartPolicy()
        self._on_restart = on_restart
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await _cancel(*self._tasks.values())

    async def add(
        self,
        replica: Replica,
        *,
        limit_deaths: bool = True,
        delay_restarts: bool = True,
        remedy: str = RESTARTING,
    ) -> None:
        """Start a replica and supervise it from then on.

        A replica that is killed by a signal during its first start is started again. Any other
        error of the first start is raised: it is for the user, and a retry would not help.
        `limit_deaths` is False where callers may kill the process and where it runs user code: then
        only failed starts count as failures. `delay_restarts` is False where a start waits for
        another host, which may come at once. `remedy` ends the report of a restart.
        """
        history = RestartHistory(replica.name, policy=self._policy)
        while True:
            try:
                await replica.start(is_restart=False)
                break
            except WorkerError as error:
                if not error.was_killed:
                    raise
                delay_s = history.add(error)
                self._report(replica, error, remedy=RESTARTING)
                await asyncio.sleep(delay_s)
        self._replicas[replica.name] = replica
        self._tasks[replica.name] = asyncio.create_task(
            self._supervise(
                replica,
                history,
                limit_deaths=limit_deaths,
                delay_restarts=delay_restarts,
                remedy=remedy,
            ),
            name=f"supervise-{replica.name}",
        )

    async def remove(self, name: str) -> None:
        """Stop a replica for good; does nothing if it was never added."""
        if (task := self._tasks.pop(name, None)) is not None:
            await _cancel(task)
            await self._replicas.pop(name).stop()

    async def run(self) -> NoReturn:
        """Ends only by cancellation, or raises why a replica cannot be restarted."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _supervise(
        self,
        replica: Replica,
        history: RestartHistory,
        *,
        limit_deaths: bool,
        delay_restarts: bool,
        remedy: str,
    ) -> None:
        try:
            while True:
                error = await replica.health()
                delay_s = history.add(error) if limit_deaths else 0.0
                self._report(replica, error, remedy=remedy)
                delay_s = delay_s if delay_restarts else 0.0
                await self._restart(replica, history, delay_s=delay_s, remedy=remedy)
        except Exception as error:  # noqa: BLE001 - raised by run()
            replica.give_up(error)
            self._failure = self._failure or error
            self._failed.set()

    async def _restart(
        self, replica: Replica, history: RestartHistory, *, delay_s: float, remedy: str
    ) -> None:
        while True:
            await asyncio.sleep(delay_s)
            try:
                return await replica.start(is_restart=True)
            except RunFailed:  # a further attempt would fail as well
                raise
            except (MillraceError, OSError) as error:
                delay_s = history.add(error)
                self._report(replica, error, remedy=remedy)

    def _report(self, replica: Replica, error: Exception, *, remedy: str) -> None:
        self.restarts[replica.name] += 1
        self._on_restart(replica.name, f"{error} {remedy}")


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
