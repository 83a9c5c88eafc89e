"""One engine's place in a pool, whoever holds it.

Promise: whoever takes the place of an engine that died is given no request before it has the newest
weights. Runs on the controller's event loop.
"""

from collections.abc import Awaitable, Callable

from millrace.cluster.worker import Worker
from millrace.core.protocols import Engine
from millrace.engines.pool import EnginePool
from millrace.engines.remote import RemoteEngine

Start = Callable[[], Awaitable[Worker]]


class EnginePlace:
    def __init__(
        self,
        pool: EnginePool,
        *,
        start: Start,
        bring_newest: Callable[[Engine], Awaitable[None]] | None,
        swap_timeout_s: float,
    ) -> None:
        """`start` starts an engine, with whatever weights; `bring_newest` is None where they never
        change."""
        self._pool = pool
        self._start = start
        self._bring_newest = bring_newest or _is_ready
        self._swap_timeout_s = swap_timeout_s
        self._held: tuple[Worker, RemoteEngine] | None = None

    async def take(self, worker: Worker) -> None:
        """Let this engine have the place; it holds the newest weights."""
        await self._give(worker, prepare=_is_ready)

    async def fill(self) -> Worker:
        """Start another engine."""
        worker = await self._start()
        await self._give(worker, prepare=self._bring_newest)
        return worker

    def clear(self) -> None:
        """Who holds it has died."""
        if self._held is not None:
            self._pool.lose(self._held[1])
            self._held = None

    async def give_up(self) -> None:
        """Once who holds it has finished its sequences, stop it."""
        if self._held is not None:
            worker, engine = self._held
            await self._pool.leave(engine)
            await worker.stop()

    async def _give(self, worker: Worker, *, prepare: Callable[[Engine], Awaitable[None]]) -> None:
        engine = RemoteEngine(worker, swap_timeout_s=self._swap_timeout_s)
        try:
            await self._pool.join(engine, prepare=prepare)
        except BaseException:
            worker.kill()
            raise
        self._held = (worker, engine)


async def _is_ready(engine: Engine) -> None:
    """It needs nothing."""
