"""Work that may take long, but must not stand still unnoticed.

Promise: whoever waits for it is told what it waits for, ever more rarely, and in the end an error
says the same. Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millrace.core.errors import RunFailed

T = TypeVar("T")


class Stalls:
    def __init__(
        self,
        *,
        warn_after_s: float,
        limit_s: float,
        explain: Callable[[], str],
        moved: Callable[[], int],
        warn: Callable[[str], None],
        what: str = "No step completed",
    ) -> None:
        """`what` does not happen, as a sentence begins. `explain` says what waits for what. `moved`
        counts what else shows that something goes on: when it changes, the time begins anew."""
        self._warn_after_s = warn_after_s
        self._limit_s = limit_s
        self._explain = explain
        self._moved = moved
        self._warn = warn
        self._what = what

    async def until(self, work: Awaitable[T]) -> T:
        """The result of `work`; RunFailed when it has stood still for limit_s."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await self._until_moved(task, moved=self._moved())
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _until_moved(self, task: asyncio.Future[T], *, moved: int) -> None:
        waited_s, next_s = 0.0, self._warn_after_s
        while True:
            await asyncio.wait({task}, timeout=min(next_s, self._limit_s) - waited_s)
            if task.done() or self._moved() != moved:
                return
            waited_s = min(next_s, self._limit_s)
            sentence = f"{self._what} for {waited_s:g} s"
            if waited_s >= self._limit_s:
                raise RunFailed(f"{sentence} (cluster.stall_timeout_s): {self._explain()}")
            self._warn(f"{sentence}: {self._explain()}")
            next_s *= 2
