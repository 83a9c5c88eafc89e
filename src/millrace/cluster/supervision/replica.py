"""What the worker pool supervises: server processes that can be started again.

Promise: a replica that start() returned from serves until health() returns. Of a group of workers
that compute together, such as the ranks of a trainer, a worker that dies or hangs ends all, and all
have ended before the next start. One failure is reported, with the worker that died first, or the
one that most likely hangs. Replicas run on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from millrace.cluster.messages import Message
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, MillraceError, RunFailed, WorkerError, cancel_all

HEALTH_CHECK_S = 0.25  # between two looks at a worker's progress
# A worker may fail this long before the death of another, which is the reason, is known.
DEATH_NOTICE_S = 0.5
GONE_S = 10.0  # for killed processes to end


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


@dataclass(eq=False)
class WorkerReplica:
    """A worker of the hub. Subclasses launch it, and connect and disconnect its callers."""

    name: str
    _: KW_ONLY
    hang_timeout_s: float | None = None  # without progress while a call expects some
    first_hang_timeout_s: float = 0.0  # until the first progress, as kernels may compile first
    on_change: Callable[[], None] = lambda: None  # called when it serves, or never will again
    num_deaths: int = 0  # serving processes that died or were killed
    given_up: Exception | None = None  # why it will not be started again
    _process: Worker | None = None  # the latest one started
    _worker: Worker | None = None  # the same while it serves

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()  # set when it serves again, or never will

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
        self._notify()

    async def health(self) -> Exception:
        worker = self._process
        assert worker is not None, "health() follows start()"
        error = await _failure([worker], self.hang_timeout_s, self.first_hang_timeout_s)
        self.drop(worker)
        return error

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def give_up(self, error: Exception) -> None:
        self.given_up = error
        self._notify()

    @property
    def serving_worker(self) -> Worker | None:
        # Supervision notices a death a little later than the calls do.
        worker = self._worker
        return None if worker is None or worker.dead.done() else worker

    async def serving(self) -> Worker:
        """The worker, once it serves; raises RunFailed if it will not be started again."""
        while self._worker is None:
            if self.given_up is not None:
                raise RunFailed(str(self.given_up)) from self.given_up
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

    def _notify(self) -> None:
        self._changed.set()
        self.on_change()


@dataclass(eq=False, kw_only=True)
class ModuleReplica(WorkerReplica):
    """A worker of one module that is loaded by one start message."""

    module: str
    message: Message
    launcher: Callable[[str, str], Awaitable[Worker]]
    start_timeout_s: float

    async def launch(self, *, is_restart: bool) -> Worker:
        worker = await self.launcher(self.name, self.module)
        await worker.start_as(self.message, timeout_s=self.start_timeout_s)
        return worker


@dataclass(eq=False)
class GroupReplica:
    """Workers that compute together. Subclasses launch them, and connect and disconnect callers."""

    name: str
    _: KW_ONLY
    members: Sequence[str]  # names of the workers
    hang_timeout_s: float  # as of WorkerReplica
    first_hang_timeout_s: float = 0.0
    _workers: Sequence[Worker] = ()  # the latest ones started
    _failing: asyncio.Task[WorkerError] | None = None  # waits for their failure

    async def launch(self, name: str) -> Worker:
        """Start the process of one member; returns once it has connected."""
        raise NotImplementedError

    async def attach(self, workers: Sequence[Worker], *, is_restart: bool) -> None:
        """Let the workers load, and connect callers to them."""

    def detach(self) -> None:
        """Disconnect callers from the workers after the death of one."""

    async def start(self, *, is_restart: bool) -> None:
        workers = self._workers = await self._launch_all()
        failing = _failure(workers, self.hang_timeout_s, self.first_hang_timeout_s)
        self._failing = asyncio.create_task(failing)
        try:
            await self._attach(workers, self._failing, is_restart=is_restart)
        except BaseException:
            self._failing.cancel()
            await _end(workers)
            raise

    async def health(self) -> Exception:
        assert self._failing is not None, "health() follows start()"
        error = await self._failing
        self.detach()
        await _end(self._workers)
        return error

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    def give_up(self, error: Exception) -> None:
        """Nothing to do: the pool ends the run, and with it whatever waits."""

    async def _launch_all(self) -> Sequence[Worker]:
        launching = [asyncio.create_task(self.launch(name)) for name in self.members]
        try:
            return await asyncio.gather(*launching)
        except BaseException:
            outcomes = await cancel_all(launching)
            await _end([found for found in outcomes if not isinstance(found, BaseException)])
            raise

    async def _attach(
        self, workers: Sequence[Worker], failing: asyncio.Task[WorkerError], *, is_restart: bool
    ) -> None:
        try:
            await self.attach(workers, is_restart=is_restart)
        except ConfigError:
            raise
        except MillraceError as error:
            await asyncio.wait({failing}, timeout=DEATH_NOTICE_S)
            if failing.done():  # the others fail because of this worker
                raise failing.result() from error
            raise


async def _failure(
    workers: Sequence[Worker], hang_timeout_s: float | None, first_hang_timeout_s: float
) -> WorkerError:
    """The error of the first worker that dies or hangs."""
    deaths: list[WorkerError] = []  # in order
    for worker in workers:
        worker.dead.add_done_callback(lambda dead: deaths.append(dead.result()))
    while not deaths:
        await asyncio.wait(
            {worker.dead for worker in workers},
            timeout=None if hang_timeout_s is None else HEALTH_CHECK_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if deaths or hang_timeout_s is None:
            continue
        limits = {"timeout_s": hang_timeout_s, "first_timeout_s": first_hang_timeout_s}
        stalls = [worker.watchdog.stalled_s(**limits) for worker in workers]
        if stalled := [stalled_s for stalled_s in stalls if stalled_s is not None]:
            reason = f"made no progress for {max(stalled):.0f} s (supervision.hang_timeout_s)"
            await _fail_hung(workers, reason)
    return deaths[0]


async def _fail_hung(workers: Sequence[Worker], reason: str) -> None:
    """All of them stand still if one does: the suspect is one that is stopped, or is behind. All
    write their stacks to their logs."""
    suspect = min(workers, key=lambda worker: (not worker.is_stopped, worker.watchdog.work))
    others = [worker for worker in workers if worker is not suspect]
    await asyncio.gather(*(worker.fail_hung(reason) for worker in (suspect, *others)))


async def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.kill()
    await asyncio.gather(*(worker.is_gone_within(GONE_S) for worker in workers))
