"""The engine processes of a server, and who starts them again.

Promise: a request that an engine had begun when it died goes on in another one, or in the one that
replaces it, from what its client was told. One that finds no engine waits, but not for ever. An
engine that dies too often ends the server, with its account. Runs on the server's event loop.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from millrace.cluster.hub import Hub
from millrace.cluster.messages import StartEngine, WorkerProgress
from millrace.cluster.supervision.supervisor import Keepers
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EnginePlace
from millrace.serving.api.replies import Health
from millrace.serving.metrics import ServerMetrics


class Engines:
    def __init__(
        self,
        hub: Hub,
        *,
        count: int,
        config: RunConfig,
        max_wait_s: float,
        metrics: ServerMetrics,
        warn: Callable[[str], None],
    ) -> None:
        """`max_wait_s`: of a request, for an engine to begin it."""
        self.pool = EnginePool(replaces=True, max_wait_s=max_wait_s)
        self._hub = hub
        self._count = count
        self._config = config
        self._metrics = metrics
        self._warn = warn
        self._keepers = Keepers(
            config.supervision,
            start_timeout_s=config.cluster.start_timeout_s,
            on_restart=self._note_restart,
        )

    async def start(self) -> None:
        """Side by side; returns when all of them serve."""
        async with asyncio.TaskGroup() as starting:
            for i in range(self._count):
                starting.create_task(self._enlist(f"engine-{i}"))

    async def run(self) -> NoReturn:
        """Keep them. Ends only by cancellation, or raises GivenUp."""
        await self._keepers.run()

    def heard(self, engine: str, progress: WorkerProgress) -> None:
        self._keepers.heard(engine, progress)

    def health(self) -> Health:
        serving = self.pool.num_engines
        is_ok = serving == self._count
        status = "ok" if is_ok else "degraded" if serving else "down"
        return Health(status=status, engines=self._count, serving=serving)

    async def _enlist(self, name: str) -> None:
        start = partial(self._start, name)
        place = EnginePlace(
            self.pool,
            start=start,
            bring_newest=None,
            swap_timeout_s=self._config.supervision.swap_timeout_s,
        )

        def clear() -> None:
            place.clear()
            self._metrics.forget(name)

        worker = await self._keepers.first(name, start)
        await place.take(worker)
        self._keepers.keep(worker, replace=place.fill, on_death=clear)

    async def _start(self, name: str) -> Worker:
        worker = await self._hub.launch(name, "millrace.inference.worker")
        load = StartEngine(
            config=self._config.model_dump(mode="json"),
            model_path=self._config.model.path,
            version=0,
        )
        try:
            await worker.call(load, timeout_s=self._config.cluster.start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        return worker

    def _note_restart(self, name: str, what: str) -> None:
        self._metrics.restarts += 1
        self._warn(what)
