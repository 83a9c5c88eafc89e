"""A worker that dies when the test says so."""

import asyncio

from millrace.core.errors import WorkerError


class FakeWorker:
    num_pulsed = 1

    def __init__(self, name: str = "engine-0") -> None:
        self.name = name
        self.dead = asyncio.get_running_loop().create_future()

    async def give_up(self, reason: str) -> None:
        self.dead.set_result(WorkerError(f"It {reason}.", worker=self.name))

    def die(self) -> None:
        error = WorkerError("It was killed.", worker=self.name, traceback="its last words")
        self.dead.set_result(error)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
