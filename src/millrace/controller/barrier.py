"""Synchronous starts, for runs that must come out the same each time.

Which sequences an engine batches together decides how its sums are rounded, and in an asynchronous
run that depends on when each request arrives. With the barrier, groups start together instead.

Promise: all groups of a round start at once, in the order in which they were issued, while nothing
else is being generated or scored. What an engine computes depends on that order alone. Failed
groups are replaced in a later round.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from millrace.controller.admission import Admission


class SyncBarrier:
    def __init__(
        self, admission: Admission, *, together: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """`together`: a context in which engines only collect requests; see EnginePool.together."""
        self._admission = admission
        self._together = together
        self._waiting: list[asyncio.Future[None]] = []
        self._is_open = False
        self._changed = asyncio.Event()
        admission.on_leave = self._changed.set

    async def wait(self) -> None:
        """Wait for the next round. The caller must send its request before it awaits anything
        else."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._changed.set()
        try:
            await turn
        finally:
            if turn in self._waiting:  # cancelled
                self._waiting.remove(turn)

    def open(self) -> None:
        """Allow rounds to start, until close()."""
        self._is_open = True
        self._changed.set()

    def close(self) -> None:
        self._is_open = False

    async def run(self) -> None:
        """Start each round when it is complete, until cancelled."""
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
        """True if every group that may run now waits here."""
        num_waiting = len(self._waiting)
        all_wait = num_waiting == self._admission.running and self._admission.is_full
        return self._is_open and num_waiting > 0 and all_wait
