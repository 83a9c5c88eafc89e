"""Whether a worker that has something to do gets on with it. That it is alive is another matter.

Work that may take long, but must not stand still unnoticed.

Promise: whoever waits for it is told what it waits for, ever more rarely, and in the end an error
says the same. Runs on the controller's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millrace.core.errors import RunFailed


class ProgressWatchdog:
    def __init__(
        self,
        *,
        timeout_s: float,
        first_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_timeout_s`: until it has done anything; it may have to compile first."""
        self._timeout_s = timeout_s
        self._first_timeout_s = max(timeout_s, first_timeout_s)
        self._clock = clock
        self._moved_s = clock()
        self._work: float | None = None  # as last told
        self._has_begun = False

    def heard(self, *, work: float, waits: bool) -> None:
        """The worker tells how much it has done, and whether it waits for something else."""
        has_moved = work != self._work
        self._has_begun |= has_moved and self._work is not None
        self._work = work
        if has_moved or waits:
            self._moved_s = self._clock()

    def hung_s(self, *, is_asked: bool) -> float | None:
        """For how long it has made no progress, if that is too long. Looked at every now and then:
        while nobody asks it for anything, it has no reason to make any."""
        now_s = self._clock()
        if not is_asked:
            self._moved_s = now_s
        limit_s = self._timeout_s if self._has_begun else self._first_timeout_s
        still_s = now_s - self._moved_s
        return still_s if still_s >= limit_s else None


T = TypeVar("T")


class StallWatchdog:
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
