"""A hub and a worker that is kept, for tests with real processes that are cheap to start."""

import asyncio
from pathlib import Path
from typing import Self

import numpy as np

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Generate, Message, WorkerProgress
from millrace.cluster.supervision.restarts import RestartLimits
from millrace.cluster.supervision.supervisor import Keeper
from millrace.cluster.supervision.watchdog import ProgressWatchdog
from millrace.cluster.worker import Worker
from millrace.core.records import Request, Sampling

HANG_S = 0.5


def ask(what: str) -> Generate:
    prompt = np.zeros(1, dtype=np.int32)
    return Generate(request=Request(id=what, prompt=prompt, sampling=Sampling()))


class Kept:
    """`worker` is the one there is now."""

    def __init__(self, module: str, *, folder: Path) -> None:
        self._module = module
        self.hub = Hub(log_dir=folder, on_event=self._heard, stop_timeout_s=2.0)
        self.restarts: list[str] = []
        self._came = asyncio.Event()
        self._keeper: Keeper | None = None

    async def __aenter__(self) -> Self:
        await self.hub.__aenter__()
        self.worker = await self.hub.launch("kept-0", self._module)
        self._keeper = Keeper(
            self.worker,
            replace=self._replace,
            on_death=self._came.clear,
            limits=RestartLimits(max_restarts=3, window_s=60.0, backoff_s=0.0),
            make_pulse=lambda: ProgressWatchdog(timeout_s=HANG_S, first_timeout_s=0.0),
            remedy="",
            on_restart=lambda _name, reason: self.restarts.append(reason),
        )
        self._keeping = asyncio.create_task(self._keeper.run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self.hub.__aexit__(None, None, None)

    async def replaced(self) -> Worker:
        async with asyncio.timeout(30):
            await self._came.wait()
        return self.worker

    async def _replace(self) -> Worker:
        self.worker = await self.hub.launch("kept-0", self._module)
        self._came.set()
        return self.worker

    def _heard(self, _worker: str, message: Message) -> None:
        if isinstance(message, WorkerProgress) and self._keeper is not None:
            self._keeper.heard(message)
