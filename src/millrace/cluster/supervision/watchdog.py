"""Detects work that stands still: of one worker, and of the whole run.

A process that is alive may still hang. ProgressWatchdog measures how long a worker with calls in
flight has reported no progress. StallWatchdog waits for a result, warns ever more rarely while
nothing moves, and finally raises RunFailed with the same explanation. Runs on the controller's
event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from millrace.core.errors import RunFailed, cancel_all


class ProgressWatchdog:
    """Progress of one worker; it is kept by the controller's handle of that worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_calls = 0  # in flight that expect progress
        self._moved_s = clock()
        self._work: float | None = None  # as last reported
        self._has_begun = False

    @property
    def work(self) -> float:
        return self._work or 0.0

    @contextlib.contextmanager
    def expect_progress(self) -> Iterator[None]:
        """A call is in flight. Time counts only while there is one."""
        if self._num_calls == 0:
            self._moved_s = self._clock()
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def report(self, *, work: float, waits: bool) -> None:
        """The worker reports how much it has done, and whether it waits for something else."""
        has_moved = work != self._work
        self._has_begun |= has_moved and self._work is not None
        self._work = work
        if has_moved or waits:
            self._moved_s = self._clock()

    def stalled_s(self, *, timeout_s: float, first_timeout_s: float) -> float | None:
        """Seconds without progress if too many, else None. `first_timeout_s`: until the first."""
        if self._num_calls == 0:
            return None
        limit_s = timeout_s if self._has_begun else max(timeout_s, first_timeout_s)
        stalled_s = self._clock() - self._moved_s
        return stalled_s if stalled_s >= limit_s else None


T = TypeVar("T")
STALL_WARNING_S = 120.0  # without progress before the first warning; the interval then doubles


@dataclass(kw_only=True, slots=True, eq=False)
class StallWatchdog:
    limit_s: float
    explain: Callable[[], str]  # ends the warning
    moved: Callable[[], int]  # counts other signs of progress: the time starts anew if it changes
    warn: Callable[[str], None]
    what: str = "No step completed"  # begins the warning
    warn_after_s: float = STALL_WARNING_S

    async def until(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; raise RunFailed if nothing moves for limit_s."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await self._until_moved(task, moved=self.moved())
            return task.result()
        finally:
            await cancel_all([task])

    async def _until_moved(self, task: asyncio.Future[T], *, moved: int) -> None:
        waited_s, next_s = 0.0, self.warn_after_s
        while True:
            await asyncio.wait({task}, timeout=min(next_s, self.limit_s) - waited_s)
            if task.done() or self.moved() != moved:
                return
            waited_s = min(next_s, self.limit_s)
            sentence = f"{self.what} for {waited_s:g} s"
            if waited_s >= self.limit_s:
                raise RunFailed(
                    f"{sentence} (twice supervision.hang_timeout_s, or 600 if that is more):"
                    f" {self.explain()}"
                )
            self.warn(f"{sentence}: {self.explain()}")
            next_s *= 2
