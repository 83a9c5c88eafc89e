"""Rounds: how groups begin when a run must come out the same each time.

Which sequences an engine computes together decides how its sums are rounded, and in a free-running
engine that depends on when each request arrived. Here groups wait for one another instead.

Promise: all groups of a round begin at once, in the order in which they were issued, and nothing
else is being played or scored then. What an engine computes depends on that order alone. Failed
groups are replaced in a later round.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from millrace.controller.admission import Admission


class SyncBarrier:
    def __init__(
        self,
        admission: Admission,
        *,
        together: Callable[[], AbstractAsyncContextManager[None]],  # within it engines only collect
    ) -> None:
        self._admission = admission
        self._together = together
        self._waiting: list[asyncio.Future[None]] = []
        self._is_open = False
        self._changed = asyncio.Event()
        admission.on_leave = self._changed.set

    async def turn(self) -> None:
        """A running group waits for its round. It must have asked the engine before it waits for
        anything else."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._changed.set()
        try:
            await turn
        finally:
            if turn in self._waiting:  # cancelled
                self._waiting.remove(turn)

    def open(self) -> None:
        """Rounds may begin until close()."""
        self._is_open = True
        self._changed.set()

    def close(self) -> None:
        self._is_open = False

    async def run(self) -> None:
        """Begin rounds as they are complete. Ends only by cancellation."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_complete:
                async with self._together():
                    turns, self._waiting = self._waiting, []
                    for turn in turns:
                        turn.set_result(None)

    @property
    def _is_complete(self) -> bool:
        """True if every group that may run now has come, and none does anything else."""
        num_waiting = len(self._waiting)
        everybody = num_waiting == self._admission.running and self._admission.is_full
        return self._is_open and num_waiting > 0 and everybody
