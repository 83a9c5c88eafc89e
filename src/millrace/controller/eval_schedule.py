"""When a run evaluates, and which version: before the first step, every few steps, and after the
last.

Promise: training waits for no evaluation, unless they are to take turns. Runs on the controller's
event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.controller.evaluation import Evaluation
from millrace.core.weight_update import WeightUpdate

Examine = Callable[[int], Awaitable[Evaluation | None]]  # after a step; None = there are no tasks


class EvalScheduler(Protocol):
    before: Evaluation | None
    after: Evaluation | None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        """Called before anything is generated for training."""
        ...

    def submit(self, update: WeightUpdate) -> None:
        """The trainer has published this version."""
        ...

    async def done_with(self, version: int) -> None:
        """Returns when the bytes of this version are not needed here."""
        ...

    async def after_step(self, version: int) -> None:
        """Called after each step but the last."""
        ...

    async def conclude(self) -> None:
        """Returns when the last version, which all engines hold, is evaluated."""
        ...


class SharedEvalScheduler:
    """Evaluates on the engines of the rollouts, beside their work, with whatever versions they hold
    meanwhile."""

    def __init__(
        self,
        *,
        examine: Examine,
        every_steps: int,
        steps: int,
        version: int,
        in_turns: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`in_turns`: training waits for evaluations, and they for this, until their version is
        there."""
        self._examine = examine
        self._every_steps = every_steps
        self._steps = steps
        self._version = version
        self._in_turns = in_turns
        self._activities: asyncio.TaskGroup | None = None
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._activities = activities
        self.before = await self._examine(self._version)

    def submit(self, update: WeightUpdate) -> None:
        """The courier brings it to these engines."""

    async def done_with(self, version: int) -> None:
        """As is the courier, by then."""

    async def after_step(self, version: int) -> None:
        if not self._every_steps or version % self._every_steps:
            return
        if self._in_turns is None:
            assert self._activities is not None, "it has begun"
            self._activities.create_task(self._examined(version))
        else:
            await self._in_turns(version)
            await self._examine(version)

    async def conclude(self) -> None:
        self.after = await self._examine(self._steps)

    async def _examined(self, version: int) -> None:
        await self._examine(version)


class PinnedEvalScheduler:
    """Evaluates on engines that do nothing else.

    They are brought a version only when one is due and the evaluation before it is over, and hold
    it until its own is over; what falls due meanwhile is made up for by the next version published
    after that. The last version is always evaluated. So a version's bytes are never kept for the
    length of an evaluation, except those of the last, when nobody needs the room any more.
    """

    def __init__(
        self,
        *,
        swap: Callable[[WeightUpdate], Awaitable[int]],
        examine: Examine,
        every_steps: int,
        steps: int,
        version: int,
    ) -> None:
        """`swap` brings a version to the engines that evaluate, which hold `version` now."""
        self._swap = swap
        self._examine = examine
        self._every_steps = every_steps
        self._steps = steps
        self._taken = version  # the newest version that was accepted
        self._is_busy = True  # with the first version at first
        self._accepted: asyncio.Queue[WeightUpdate] = asyncio.Queue()  # two at most; see submit()
        self._needed: dict[int, asyncio.Event] = {}  # by version; set once its bytes are not
        self._running: asyncio.Task[None] | None = None
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._running = activities.create_task(self._run())

    def submit(self, update: WeightUpdate) -> None:
        is_last = update.version == self._steps
        if is_last or (self._is_due(update.version) and not self._is_busy):
            self._taken, self._is_busy = update.version, True
            self._needed[update.version] = asyncio.Event()
            self._accepted.put_nowait(update)

    async def done_with(self, version: int) -> None:
        if (is_fetched := self._needed.get(version)) is not None:
            await is_fetched.wait()

    async def after_step(self, version: int) -> None:
        """What is due is known when it is published."""

    async def conclude(self) -> None:
        assert self._running is not None, "it has begun"
        await self._running

    async def _run(self) -> None:
        version = self._taken  # what the engines hold; meanwhile another may be accepted
        self.before = self.after = await self._examine(version)
        while version < self._steps:
            self._is_busy = not self._accepted.empty()
            update = await self._accepted.get()
            version = await self._swap(update)  # or a newer one, if an engine or it was lost
            self._needed.pop(update.version).set()
            self.after = await self._examine(version)

    def _is_due(self, version: int) -> bool:
        """True if a step after which to evaluate was done since the last accepted version."""
        every = self._every_steps
        return every > 0 and version // every > self._taken // every
