"""What the worker pool supervises: one server process that can be started again.

Promise: a replica that start() returned from serves until health() returns. Replicas run on the
controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.cluster.messages import Message
from millrace.cluster.worker import Worker
from millrace.core.errors import RunFailed

HEALTH_CHECK_S = 0.25  # between two looks at a worker's progress


class Replica(Protocol):
    """A server process of any kind: a worker of the hub, or a server of another project."""

    name: str

    async def start(self, *, is_restart: bool) -> None:
        """Start a process; returns once it serves. Raises MillraceError or OSError if it does not
        come up, and RunFailed if a further attempt would fail as well."""

    async def health(self) -> Exception:
        """Wait until the process has died or hangs, and end it; returns the reason."""
        ...

    async def stop(self) -> None:
        """End the process in order; it is supervised no longer."""

    def give_up(self, error: Exception) -> None:
        """Fail whatever waits for this replica: it will not be started again."""


class WorkerReplica:
    """A worker of the hub. Subclasses launch it, and connect and disconnect its callers."""

    def __init__(
        self, name: str, *, hang_timeout_s: float | None = None, first_hang_timeout_s: float = 0.0
    ) -> None:
        """`hang_timeout_s`: longest time without progress while a call expects some;
        `first_hang_timeout_s`: the same until the first progress, as kernels may compile first."""
        self.name = name
        self.num_deaths = 0  # serving processes that died or were killed
        self._hang_timeout_s = hang_timeout_s
        self._first_hang_timeout_s = first_hang_timeout_s
        self._process: Worker | None = None  # the latest one started
        self._worker: Worker | None = None  # the same while it serves
        self._changed = asyncio.Event()  # set when it serves again, or never will
        self._given_up: Exception | None = None

    async def launch(self, *, is_restart: bool) -> Worker:
        """Start a worker; returns once it has loaded."""
        raise NotImplementedError

    async def attach(self, worker: Worker, *, is_restart: bool) -> None:
        """Connect callers to the new worker."""

    def detach(self) -> None:
        """Disconnect callers from a worker that died."""

    async def start(self, *, is_restart: bool) -> None:
        worker = await self.launch(is_restart=is_restart)
        self._process = worker
        try:
            await self.attach(worker, is_restart=is_restart)
        except BaseException:
            worker.kill()
            raise
        self._worker = worker
        self._changed.set()

    async def health(self) -> Exception:
        worker = self._process
        assert worker is not None, "health() follows start()"
        await self._wait_for_failure(worker)
        self.drop(worker)
        return worker.dead.result()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def give_up(self, error: Exception) -> None:
        self._given_up = error
        self._changed.set()

    async def serving(self) -> Worker:
        """The worker, once it serves; raises RunFailed if it will not be started again."""
        while self._worker is None:
            if self._given_up is not None:
                raise RunFailed(str(self._given_up)) from self._given_up
            self._changed.clear()
            await self._changed.wait()
        return self._worker

    def drop(self, worker: Worker) -> None:
        """Kill a worker that failed. Calls wait for the next one from here on."""
        worker.kill()
        if worker is self._worker:
            self._worker = None
            self.num_deaths += 1
            self.detach()

    async def _wait_for_failure(self, worker: Worker) -> None:
        if self._hang_timeout_s is None:
            await asyncio.wait({worker.dead})
            return
        while not worker.dead.done():
            await asyncio.wait({worker.dead}, timeout=HEALTH_CHECK_S)
            stalled_s = worker.watchdog.stalled_s(
                timeout_s=self._hang_timeout_s, first_timeout_s=self._first_hang_timeout_s
            )
            if stalled_s is not None:
                await worker.fail_hung(no_progress(stalled_s))


def no_progress(stalled_s: float) -> str:
    return f"made no progress for {stalled_s:.0f} s (supervision.hang_timeout_s)"


class ModuleReplica(WorkerReplica):
    """A worker of one module that is loaded by one start message."""

    def __init__(
        self,
        name: str,
        *,
        module: str,
        start: Message,
        launch: Callable[[str, str], Awaitable[Worker]],
        start_timeout_s: float,
        hang_timeout_s: float | None = None,
    ) -> None:
        super().__init__(name, hang_timeout_s=hang_timeout_s)
        self._module = module
        self._start = start
        self._launch = launch
        self._start_timeout_s = start_timeout_s

    async def launch(self, *, is_restart: bool) -> Worker:
        worker = await self._launch(self.name, self._module)
        await worker.start_as(self._start, timeout_s=self._start_timeout_s)
        return worker
