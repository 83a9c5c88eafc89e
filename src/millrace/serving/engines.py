"""The engine processes of a server.

Promise: a request whose engine dies resumes on another engine, or on the restarted one, from its
last streamed token. A request that finds no engine waits for a limited time. An engine that fails
too often ends the server with its last error. Runs on the server's event loop.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from millrace.cluster.messages import StartEngine
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.inference.backend import load_backend
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EngineReplica
from millrace.serving.api.replies import Health
from millrace.serving.metrics import ServerMetrics


@dataclass(kw_only=True, eq=False)
class Engines:
    worker_pool: WorkerPool
    count: int
    config: RunConfig
    max_wait_s: float  # of a request for an engine
    metrics: ServerMetrics

    def __post_init__(self) -> None:
        self.pool = EnginePool(replaces=True, max_wait_s=self.max_wait_s)

    async def start(self) -> None:
        """Start all engines concurrently; returns when all of them serve."""
        async with asyncio.TaskGroup() as starting:
            for i in range(self.count):
                starting.create_task(self.worker_pool.add(self._replica(f"engine-{i}")))

    def health(self) -> Health:
        serving = self.pool.num_engines
        is_ok = serving == self.count
        status = "ok" if is_ok else "degraded" if serving else "down"
        return Health(status=status, engines=self.count, serving=serving)

    def _replica(self, name: str) -> EngineReplica:
        return EngineReplica(
            name,
            pool=self.pool,
            start=partial(self._start, name),
            load_newest=None,
            hang_timeout_s=self.config.supervision.hang_timeout_s,
            start_timeout_s=self.config.cluster.start_timeout_s,
            capabilities=load_backend(self.config.engine).capabilities,
            on_lost=lambda: self.metrics.forget(name),
        )

    async def _start(self, name: str, _is_late: bool) -> Worker:
        worker = await self.worker_pool.launch(name, "millrace.inference.worker")
        device = self.config.placement.engine(int(name.rpartition("-")[2]))
        start = StartEngine(
            config=self.config.placed_on(device).model_dump(mode="json"),
            model_path=self.config.model.path,
            version=0,
        )
        await worker.start_as(start, timeout_s=self.config.cluster.start_timeout_s)
        return worker
