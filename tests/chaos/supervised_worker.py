"""A hub with one supervised worker, for tests with real processes that start fast."""

import asyncio
import contextlib
from pathlib import Path
from typing import Self

import numpy as np

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Generate
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.cluster.supervision.replica import WorkerReplica
from millrace.cluster.worker import Worker
from millrace.core.records import Request, Sampling

HANG_S = 0.5


def generate(request_id: str) -> Generate:
    prompt = np.zeros(1, dtype=np.int32)
    return Generate(request=Request(id=request_id, prompt=prompt, sampling=Sampling()))


class _Replica(WorkerReplica):
    def __init__(self, hub: Hub, module: str) -> None:
        super().__init__("supervised-0", hang_timeout_s=HANG_S)
        self._hub = hub
        self._module = module

    async def launch(self, *, is_restart: bool) -> Worker:
        return await self._hub.launch(self.name, self._module)


class SupervisedWorker:
    """`worker` is the current process."""

    def __init__(self, module: str, *, folder: Path) -> None:
        self.hub = Hub(log_dir=folder, on_event=lambda *_: None, stop_timeout_s=2.0)
        self.restarts: list[str] = []
        self._replica = _Replica(self.hub, module)
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exit.enter_async_context(self.hub)
        pool = WorkerPool(
            self.hub.launch,
            policy=RestartPolicy(max_restarts=3, window_s=60.0, backoff_s=0.0),
            on_restart=lambda _name, reason: self.restarts.append(reason),
        )
        await self._exit.enter_async_context(pool)
        await pool.add(self._replica)
        self.worker = await self._replica.serving()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._exit.aclose()

    async def replaced(self) -> Worker:
        """The process that replaces the current one, once it serves."""
        async with asyncio.timeout(30):
            while (worker := await self._replica.serving()) is self.worker:
                await asyncio.wait({worker.dead})
        self.worker = worker
        return worker
