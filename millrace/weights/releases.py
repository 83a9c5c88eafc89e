"""Tells the trainer which versions nobody reads any more, without making anybody wait for it.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable

from millrace.core.weight_update import WeightUpdate


class Releases:
    def __init__(
        self,
        release: Callable[[WeightUpdate], Awaitable[object]],
        *,
        after: tuple[Callable[[int], Awaitable[object]], ...],
    ) -> None:
        """`release` an update once all of `after` are done with its version."""
        self._release = release
        self._after = after
        self._under_way: set[asyncio.Task[None]] = set()

    def begin(self, update: WeightUpdate) -> None:
        task = asyncio.create_task(self._run(update))
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    async def _run(self, update: WeightUpdate) -> None:
        for done_with in self._after:
            await done_with(update.version)
        await self._release(update)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.result()
