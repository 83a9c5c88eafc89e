"""Brings the policy's versions to those that follow it beside the engines: self-teachers.

Promise: nobody waits for a follower. Each is brought one version at a time, the newest there is
when it is ready for one; what came in between it never sees. A version's bytes are needed until all
of them are done with it.

Runs on the controller's event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from millrace.core.weight_update import WeightUpdate
from millrace.weights.courier import Courier, never


class Followers:
    def __init__(
        self,
        swaps: Sequence[Callable[[WeightUpdate], Awaitable[int]]],
        *,
        version: int,
        is_lost: Callable[[WeightUpdate], Awaitable[bool]] = never,
    ) -> None:
        """`swaps`: of each follower; returns when it has taken what it needs of a version."""
        self._couriers = [
            Courier(
                swap=swap,
                release=self._done,
                on_visible=lambda _: None,
                version=version,
                is_lost=is_lost,
            )
            for swap in swaps
        ]
        self._readers: Counter[int] = Counter()  # by version: followers that may still read it
        self._unread: dict[int, asyncio.Event] = {}  # by version; set once none of them does

    def submit(self, update: WeightUpdate) -> None:
        """The trainer has published this version."""
        if self._couriers:
            self._readers[update.version] = len(self._couriers)
            self._unread[update.version] = asyncio.Event()
        for courier in self._couriers:
            courier.submit(update)

    async def run(self) -> None:
        """Deliver for ever."""
        async with asyncio.TaskGroup() as delivering:
            for courier in self._couriers:
                delivering.create_task(courier.run())

    async def done_with(self, version: int) -> None:
        """Returns when the bytes of this version are not needed here."""
        if (unread := self._unread.get(version)) is not None:
            await unread.wait()

    def _done(self, update: WeightUpdate) -> None:
        version = update.version
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]
            self._unread.pop(version).set()
