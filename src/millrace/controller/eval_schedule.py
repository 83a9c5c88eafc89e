"""When a run evaluates: before the first step, every few steps, and after the last.

Promise: training waits for no evaluation, except with the synchronous barrier. Runs on the
controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from millrace.controller.evaluation import Evaluation
from millrace.core.records import WeightUpdate
from millrace.weights.broadcaster import Receive

# Called after a step; returns None without held-out tasks.
Evaluate = Callable[[int], Coroutine[Any, Any, Evaluation | None]]


@dataclass(kw_only=True, eq=False)
class EvalScheduler:
    evaluate: Evaluate
    every_steps: int
    steps: int
    version: int  # that the engines hold at first
    before: Evaluation | None = None  # of the version that the run started with
    after: Evaluation | None = None  # of the last version

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        """Called before anything is generated for training."""
        raise NotImplementedError

    async def after_step(self, version: int) -> None:
        """Called after each step but the last."""

    async def finish(self) -> None:
        """Returns when the last version, which all engines hold, is evaluated."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class SharedEvalScheduler(EvalScheduler):
    """Evaluates on the rollout engines, beside their other work, with the versions they hold."""

    # Waits until the engines hold a version. With it, after_step() waits for that and evaluates.
    reached: Callable[[int], Awaitable[None]] | None = None
    _activities: asyncio.TaskGroup | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._activities = activities
        self.before = await self.evaluate(self.version)

    async def after_step(self, version: int) -> None:
        if not self.every_steps or version % self.every_steps:
            return
        if self.reached is None:
            assert self._activities is not None, "begin() comes first"
            self._activities.create_task(self.evaluate(version))
        else:
            await self.reached(version)
            await self.evaluate(version)

    async def finish(self) -> None:
        self.after = await self.evaluate(self.steps)


@dataclass(kw_only=True, eq=False)
class PinnedEvalScheduler(EvalScheduler):
    """Evaluates on engines that do nothing else; a subscriber of the version broadcast.

    The engines receive a version only when an evaluation is due and the previous one is over, and
    they keep it until theirs is over. If evaluations fall due meanwhile, the next version published
    afterwards is evaluated instead. So the bytes of a version are not kept for the length of an
    evaluation, except those of the last version, which is always evaluated.
    """

    swap: Receive  # loads a version into the evaluation engines
    _idle: asyncio.Event = field(default_factory=asyncio.Event)  # set if there is nothing to do
    _loaded: asyncio.Queue[int] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    _running: asyncio.Task[None] | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._running = activities.create_task(self._run(self.version))

    def wants(self, version: int) -> bool:
        """True for the last version, and if an evaluation is due and none is running."""
        every = self.every_steps
        is_due = every > 0 and version // every > self.version // every
        return version == self.steps or (is_due and self._idle.is_set())

    async def receive(self, update: WeightUpdate) -> int:
        """Returns when the engines hold this version or, if one of them was lost, a newer one."""
        await self._idle.wait()
        self._idle.clear()
        self.version = update.version  # wants() finds out what is due after it
        try:
            version = await self.swap(update)
        except BaseException:
            self._idle.set()
            raise
        self._loaded.put_nowait(version)
        return version

    async def finish(self) -> None:
        assert self._running is not None, "begin() comes first"
        await self._running

    async def _run(self, version: int) -> None:
        self.before = self.after = await self.evaluate(version)
        while version < self.steps:
            self._idle.set()
            version = await self._loaded.get()
            self.after = await self.evaluate(version)
