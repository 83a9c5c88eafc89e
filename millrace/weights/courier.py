"""Carries published versions from the trainer to the engines, newest first.

Promise: one update travels at a time; of those that wait, only the newest is sent, the others are
superseded. A version's bytes are released once no engine reads them any more. A version that is
lost on its way with the trainer that published it is given up; engines keep what they have.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable

from millrace.core.errors import WeightError
from millrace.core.weight_update import WeightUpdate
from millrace.weights.newest import Newest


async def never(update: WeightUpdate) -> bool:
    """For those whose trainer is not replaced: its loss ends the run."""
    return False


class Courier:
    def __init__(
        self,
        *,
        swap: Callable[[WeightUpdate], Awaitable[int]],
        release: Callable[[WeightUpdate], None],
        on_visible: Callable[[int], None],
        version: int,
        is_lost: Callable[[WeightUpdate], Awaitable[bool]] = never,
    ) -> None:
        """`is_lost`: whether the trainer that published this update is dead."""
        self._swap = swap
        self._release = release
        self._on_visible = on_visible
        self._newest = Newest()
        self._is_lost = is_lost
        self._superseded: list[WeightUpdate] = []
        self._visible = version
        self._became_visible = asyncio.Condition()
        self.num_superseded = 0

    @property
    def visible(self) -> int:
        """The version that every engine holds, or a newer one."""
        return self._visible

    def submit(self, update: WeightUpdate) -> None:
        """Called when the trainer has published; replaces one that still waits."""
        if (superseded := self._newest.put(update)) is not None:
            self._superseded.append(superseded)
            self.num_superseded += 1

    async def run(self) -> None:
        """Deliver for ever. Ends only by cancellation or because an engine refused an update."""
        while True:
            update = await self._newest.take()
            superseded, self._superseded = self._superseded, []
            for earlier in superseded:
                self._release(earlier)
            try:
                self._visible = await self._swap(update)
            except WeightError:
                if not await self._is_lost(update):
                    raise
                self._release(update)
                continue  # who takes the trainer's place publishes the newest version again
            self._on_visible(self._visible)
            async with self._became_visible:
                self._became_visible.notify_all()
            self._release(update)

    async def wait_visible(self, version: int) -> None:
        """Until every engine holds this version or a newer one."""
        async with self._became_visible:
            await self._became_visible.wait_for(lambda: self._visible >= version)
