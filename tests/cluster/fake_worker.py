"""A worker that dies when the test says so, and a replica made of such workers."""

import asyncio

from millrace.cluster.supervision.replica import WorkerReplica
from millrace.cluster.supervision.watchdog import ProgressWatchdog
from millrace.core.errors import WorkerError


class FakeWorker:
    is_stopped = False

    def __init__(self, name: str = "engine-0") -> None:
        self.name = name
        self.dead = asyncio.get_running_loop().create_future()
        self.watchdog = ProgressWatchdog()
        self.was_stopped = False

    async def fail_hung(self, reason: str) -> None:
        self.dead.set_result(WorkerError(f"It {reason}.", worker=self.name))

    def die(self) -> None:
        error = WorkerError("It was killed.", worker=self.name, traceback="its log")
        self.dead.set_result(error)

    def kill(self) -> None:
        """The tests say when it is dead."""

    async def stop(self) -> None:
        self.was_stopped = True


class FakeReplica(WorkerReplica):
    """Each start gives the next of `outcomes`: a worker, or an error."""

    def __init__(self, *outcomes, name="engine-0", hang_timeout_s=None) -> None:
        super().__init__(name, hang_timeout_s=hang_timeout_s)
        self.outcomes = list(outcomes)
        self.attached: list[tuple[FakeWorker, bool]] = []  # and whether it was a restart
        self.num_detached = 0

    async def launch(self, *, is_restart: bool):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def attach(self, worker, *, is_restart: bool) -> None:
        self.attached.append((worker, is_restart))

    def detach(self) -> None:
        self.num_detached += 1


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
