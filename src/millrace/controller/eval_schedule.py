"""When a run evaluates: before the first step, every few steps, and after the last.

Promise: training waits for no evaluation, except with the synchronous barrier. Runs on the
controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.controller.evaluation import Evaluation
from millrace.core.records import WeightUpdate
from millrace.weights.broadcaster import Receive

Evaluate = Callable[[int], Awaitable[Evaluation | None]]  # after a step; None = no held-out tasks


class EvalScheduler(Protocol):
    before: Evaluation | None  # of the version that the run started with
    after: Evaluation | None  # of the last version

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        """Called before anything is generated for training."""
        ...

    async def after_step(self, version: int) -> None:
        """Called after each step but the last."""
        ...

    async def finish(self) -> None:
        """Returns when the last version, which all engines hold, is evaluated."""
        ...


class SharedEvalScheduler:
    """Evaluates on the rollout engines, beside their other work, with the versions they hold."""

    def __init__(
        self,
        *,
        evaluate: Evaluate,
        every_steps: int,
        steps: int,
        version: int,
        reached: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`reached` waits until the engines hold a version. If it is given, after_step() waits for
        it and for the evaluation."""
        self._evaluate = evaluate
        self._every_steps = every_steps
        self._steps = steps
        self._version = version
        self._reached = reached
        self._activities: asyncio.TaskGroup | None = None
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._activities = activities
        self.before = await self._evaluate(self._version)

    async def after_step(self, version: int) -> None:
        if not self._every_steps or version % self._every_steps:
            return
        if self._reached is None:
            assert self._activities is not None, "begin() comes first"
            self._activities.create_task(self._evaluate_beside(version))
        else:
            await self._reached(version)
            await self._evaluate(version)

    async def finish(self) -> None:
        self.after = await self._evaluate(self._steps)

    async def _evaluate_beside(self, version: int) -> None:
        await self._evaluate(version)


class PinnedEvalScheduler:
    """Evaluates on engines that do nothing else; a subscriber of the version broadcast.

    The engines receive a version only when an evaluation is due and the previous one is over, and
    they keep it until theirs is over. If evaluations fall due meanwhile, the next version published
    afterwards is evaluated instead. The last version is always evaluated. So a version's bytes are
    not kept for the length of an evaluation; only those of the last are, when nothing else needs
    the room.
    """

    def __init__(
        self, *, swap: Receive, evaluate: Evaluate, every_steps: int, steps: int, version: int
    ) -> None:
        """`swap` loads a version into the evaluation engines, which hold `version` now."""
        self._swap = swap
        self._evaluate = evaluate
        self._every_steps = every_steps
        self._steps = steps
        self._received = version  # newest version that receive() was called with
        self._idle = asyncio.Event()  # set while there is nothing to evaluate
        self._loaded: asyncio.Queue[int] = asyncio.Queue(maxsize=1)  # version to evaluate next
        self._running: asyncio.Task[None] | None = None
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._running = activities.create_task(self._run(self._received))

    def wants(self, version: int) -> bool:
        """True for the last version, and if an evaluation is due and none is running."""
        every = self._every_steps
        is_due = every > 0 and version // every > self._received // every
        return version == self._steps or (is_due and self._idle.is_set())

    async def receive(self, update: WeightUpdate) -> int:
        """Returns when the engines hold this version or, if one of them was lost, a newer one."""
        await self._idle.wait()
        self._idle.clear()
        self._received = update.version
        try:
            version = await self._swap(update)
        except BaseException:
            self._idle.set()
            raise
        self._loaded.put_nowait(version)
        return version

    async def after_step(self, version: int) -> None:
        """Nothing to do: wants() finds out what is due."""

    async def finish(self) -> None:
        assert self._running is not None, "begin() comes first"
        await self._running

    async def _run(self, version: int) -> None:
        self.before = self.after = await self._evaluate(version)
        while version < self._steps:
            self._idle.set()
            version = await self._loaded.get()
            self.after = await self._evaluate(version)
