"""Tells the trainer which versions nobody reads any more, without making anybody wait for it.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable

from millrace.core.errors import WorkerError


class Releases:
    def __init__(
        self,
        release: Callable[[int], Awaitable[object]],
        *,
        after: tuple[Callable[[int], Awaitable[object]], ...],
    ) -> None:
        """`release` a version once all of `after` are done with it."""
        self._release = release
        self._after = after
        self._under_way: set[asyncio.Task[None]] = set()

    def begin(self, version: int) -> None:
        task = asyncio.create_task(self._run(version))
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    async def _run(self, version: int) -> None:
        for done_with in self._after:
            await done_with(version)
        await self._release(version)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        # A trainer that died is reported, with its traceback, by whoever watches the workers.
        if not task.cancelled() and not isinstance(task.exception(), WorkerError | None):
            task.result()
