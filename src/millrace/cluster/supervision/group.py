"""A replica of several workers that compute together, such as the ranks of a trainer.

Promise: a worker that dies or hangs ends all of them, and all have ended before the next start. One
failure is reported, with the worker that died first, or the one that most likely hangs.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Sequence

from millrace.cluster.supervision.replica import HEALTH_CHECK_S, no_progress
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, MillraceError, WorkerError

# A worker may fail this long before the death of another, which is the reason, is known.
DEATH_NOTICE_S = 0.5
GONE_S = 10.0  # for killed processes to end


class GroupReplica:
    """Subclasses launch the workers, and connect and disconnect their callers."""

    def __init__(
        self,
        name: str,
        *,
        members: Sequence[str],
        hang_timeout_s: float,
        first_hang_timeout_s: float = 0.0,
    ) -> None:
        """`members`: names of the workers. The time limits are those of WorkerReplica."""
        self.name = name
        self._members = members
        self._hang_timeout_s = hang_timeout_s
        self._first_hang_timeout_s = first_hang_timeout_s
        self._workers: Sequence[Worker] = ()  # the latest ones started
        self._failing: asyncio.Task[WorkerError] | None = None  # waits for their failure

    async def launch(self, name: str) -> Worker:
        """Start the process of one member; returns once it has connected."""
        raise NotImplementedError

    async def attach(self, workers: Sequence[Worker], *, is_restart: bool) -> None:
        """Let the workers load, and connect callers to them."""

    def detach(self) -> None:
        """Disconnect callers from the workers after the death of one."""

    async def start(self, *, is_restart: bool) -> None:
        workers = self._workers = await self._launch_all()
        failing = self._failing = asyncio.create_task(self._wait_for_failure(workers))
        try:
            await self._attach(workers, is_restart=is_restart, failing=failing)
        except BaseException:
            failing.cancel()
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
        launching = [asyncio.create_task(self.launch(name)) for name in self._members]
        try:
            return await asyncio.gather(*launching)
        except BaseException:
            for task in launching:
                task.cancel()
            outcomes = await asyncio.gather(*launching, return_exceptions=True)
            await _end([found for found in outcomes if not isinstance(found, BaseException)])
            raise

    async def _attach(
        self, workers: Sequence[Worker], *, is_restart: bool, failing: asyncio.Task[WorkerError]
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

    async def _wait_for_failure(self, workers: Sequence[Worker]) -> WorkerError:
        """The error of the first worker that dies or hangs."""
        deaths: list[WorkerError] = []  # in order
        for worker in workers:
            worker.dead.add_done_callback(lambda dead: deaths.append(dead.result()))
        while not deaths:
            await asyncio.wait(
                {worker.dead for worker in workers},
                timeout=HEALTH_CHECK_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            stalls = [
                worker.watchdog.stalled_s(
                    timeout_s=self._hang_timeout_s, first_timeout_s=self._first_hang_timeout_s
                )
                for worker in workers
            ]
            if not deaths and (stalled := [s for s in stalls if s is not None]):
                await _fail_hung(workers, no_progress(max(stalled)))
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
