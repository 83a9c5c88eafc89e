"""Carries published versions from the trainer to the engines, newest first.

Promise: one update travels at a time; of those that wait, only the newest is sent, the others are
superseded. A version's bytes are released once no engine reads them any more. A version that is
lost on its way with the trainer that published it is given up; engines keep what they have.

Runs on the controller's event loop.

Brings the policy's versions to those that follow it beside the engines: self-teachers.

Promise: nobody waits for a follower. Each is brought one version at a time, the newest there is
when it is ready for one; what came in between it never sees. A version's bytes are needed until all
of them are done with it.

Runs on the controller's event loop.

Tells the trainer which versions nobody reads any more, without making anybody wait for it.

Runs on the controller's event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from millrace.core.errors import WeightError
from millrace.core.weight_update import WeightUpdate
from millrace.weights.notifier import Newest


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
