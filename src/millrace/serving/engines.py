"""The engine processes of a server.

Promise: a request whose engine dies resumes on another engine, or on the restarted one, from its
last streamed token. A request that finds no engine waits for a limited time. An engine that fails
too often ends the server with its last error. Runs on the server's event loop.
"""

import asyncio
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


class Engines:
    def __init__(
        self,
        worker_pool: WorkerPool,
        *,
        count: int,
        config: RunConfig,
        max_wait_s: float,
        metrics: ServerMetrics,
    ) -> None:
        """`max_wait_s`: longest wait of a request for an engine."""
        self.pool = EnginePool(replaces=True, max_wait_s=max_wait_s)
        self._worker_pool = worker_pool
        self._count = count
        self._config = config
        self._metrics = metrics

    async def start(self) -> None:
        """Start all engines concurrently; returns when all of them serve."""
        async with asyncio.TaskGroup() as starting:
            for i in range(self._count):
                starting.create_task(self._worker_pool.add(self._replica(f"engine-{i}")))

    def health(self) -> Health:
        serving = self.pool.num_engines
        is_ok = serving == self._count
        status = "ok" if is_ok else "degraded" if serving else "down"
        return Health(status=status, engines=self._count, serving=serving)

    def _replica(self, name: str) -> EngineReplica:
        return EngineReplica(
            name,
            pool=self.pool,
            start=partial(self._start, name),
            load_newest=None,
            hang_timeout_s=self._config.supervision.hang_timeout_s,
            start_timeout_s=self._config.cluster.start_timeout_s,
            capabilities=load_backend(self._config.engine).capabilities,
            on_lost=lambda: self._metrics.forget(name),
        )

    async def _start(self, name: str, _is_late: bool) -> Worker:
        worker = await self._worker_pool.launch(name, "millrace.inference.worker")
        device = self._config.placement.engine(int(name.rpartition("-")[2]))
        start = StartEngine(
            config=self._config.placed_on(device).model_dump(mode="json"),
            model_path=self._config.model.path,
            version=0,
        )
        await worker.start_as(start, timeout_s=self._config.cluster.start_timeout_s)
        return worker
