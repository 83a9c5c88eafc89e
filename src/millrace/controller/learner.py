"""The training loop: take a batch, step, record, checkpoint, evaluate.

Promise: one batch is one step is one version. The next batch is taken while the current one is
trained. A resumed run first repeats the steps that its journal holds beyond its checkpoint, with
the same batches.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Sequence

from millrace.cluster.messages import Stepped
from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.controller.admission import SyncBarrier
from millrace.controller.batches import Batches, Taken
from millrace.controller.checkpointing import RunCheckpoints
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.eval_schedule import EvalScheduler
from millrace.controller.reporting import LearnerState, RunReporter
from millrace.core.microbatch import Batch
from millrace.inference.pool import EnginePool
from millrace.training.group import TrainerGroup


class Learner:
    def __init__(
        self,
        config: RunConfig,
        *,
        state: LearnerState,
        batches: Batches,
        trainer: TrainerGroup,
        dispatcher: Dispatcher,
        checkpoints: RunCheckpoints,
        eval_scheduler: EvalScheduler,
        reporter: RunReporter,
        paused: Sequence[EnginePool] = (),
        barrier: SyncBarrier | None = None,
    ) -> None:
        """`paused`: engines that stand still during a step."""
        self._steps = config.trainer.steps
        self._state = state
        self._batches = batches
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._checkpoints = checkpoints
        self._eval_scheduler = eval_scheduler
        self._reporter = reporter
        self._paused = paused
        self._barrier = barrier
        self._stalls = StallWatchdog(
            limit_s=config.cluster.stall_timeout_s,
            explain=reporter.standstill,
            moved=lambda: trainer.num_redone,
            warn=reporter.monitor.warn,
        )

    async def run(self, activities: asyncio.TaskGroup) -> None:
        """Train until the last step."""
        state = self._state
        if state.version == self._steps:
            return  # a run that crashed after its last step
        upcoming = activities.create_task(self._batches.next(state.version))
        while state.version < self._steps:
            taken = await self._take(upcoming)
            if state.version + 1 < self._steps:
                # For the version that this step makes, which the trainer has when it is used.
                activities.create_task(self._dispatcher.expire(state.version + 1))
                upcoming = activities.create_task(self._batches.next(state.version + 1))
            stepped = await self._stalls.until(self._step(taken.batches))
            await self._reporter.record(stepped, taken)
            state.version += 1
            self._batches.applied(taken, version=state.version, was_skipped=bool(stepped.skipped))
            await self._checkpoints.after_step(state.version, activities)
            if state.version < self._steps:
                await self._eval_scheduler.after_step(state.version)

    async def _take(self, upcoming: Awaitable[Taken]) -> Taken:
        if self._barrier is not None:
            self._barrier.open()
        self._state.awaits_batch = True
        taken = await self._stalls.until(upcoming)
        self._state.awaits_batch = False
        if self._barrier is not None:
            self._barrier.close()  # until the evaluation after this step is over
        return taken

    async def _step(self, batches: tuple[Batch, ...]) -> Stepped:
        await asyncio.gather(*(engines.pause() for engines in self._paused))
        stepped = await self._trainer.step(*batches, version=self._state.version + 1)
        # Publishing the weights is copying and needs no pause. After a step that failed the engines
        # stay paused, as it ends the run.
        await asyncio.gather(*(engines.resume() for engines in self._paused))
        return stepped
