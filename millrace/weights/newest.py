"""The update that waits to be told of, of which there is one: a newer one supersedes it.

Used on the controller's event loop, by one that puts and one that takes.
"""

import asyncio

from millrace.core.weight_update import WeightUpdate


class Newest:
    def __init__(self) -> None:
        self._waiting: WeightUpdate | None = None
        self._arrived = asyncio.Event()

    def put(self, update: WeightUpdate) -> WeightUpdate | None:
        """Returns the one that still waited, if one did; nobody will take that."""
        superseded, self._waiting = self._waiting, update
        self._arrived.set()
        return superseded

    async def take(self) -> WeightUpdate:
        """Waits until there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        update, self._waiting = self._waiting, None
        assert update is not None
        return update
