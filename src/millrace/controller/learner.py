"""The training loop: take a batch, step, record, checkpoint, evaluate.

Promise: one batch is one step is one version. The next batch is taken while the current one is
trained. A resumed run first repeats the steps that its journal holds beyond its checkpoint, with
the same batches.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from millrace.cluster.messages import Stepped
from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.controller.admission import SyncBarrier
from millrace.controller.batches import Batches, TakenBatch
from millrace.controller.checkpointing import RunCheckpoints
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.eval_schedule import EvalScheduler
from millrace.controller.reporting import LearnerState, RunReporter
from millrace.core.microbatch import Batch
from millrace.inference.pool import EnginePool
from millrace.training.group import TrainerGroup


@dataclass(kw_only=True, eq=False)
class Learner:
    config: RunConfig
    state: LearnerState
    batches: Batches
    trainer: TrainerGroup
    dispatcher: Dispatcher
    checkpoints: RunCheckpoints
    eval_scheduler: EvalScheduler
    reporter: RunReporter
    paused: Sequence[EnginePool] = ()  # engines that stand still during a step
    barrier: SyncBarrier | None = None

    def __post_init__(self) -> None:
        self._stalls = StallWatchdog(
            limit_s=self.config.cluster.stall_timeout_s,
            explain=self.reporter.standstill,
            moved=lambda: self.trainer.num_redone,
            warn=self.reporter.monitor.warn,
        )

    async def run(self, activities: asyncio.TaskGroup) -> None:
        """Train until the last step."""
        state = self.state
        if state.version == self.config.trainer.steps:
            return  # a run that crashed after its last step
        upcoming = activities.create_task(self.batches.next(state.version))
        while state.version < self.config.trainer.steps:
            taken = await self._take(upcoming)
            if state.version + 1 < self.config.trainer.steps:
                # For the version that this step makes, which the trainer has when it is used.
                activities.create_task(self.dispatcher.expire(state.version + 1))
                upcoming = activities.create_task(self.batches.next(state.version + 1))
            stepped = await self._stalls.until(self._step(taken.batches))
            await self.reporter.record(stepped, taken)
            state.version += 1
            self.batches.applied(taken, version=state.version, was_skipped=bool(stepped.skipped))
            await self.checkpoints.after_step(state.version, activities)
            if state.version < self.config.trainer.steps:
                await self.eval_scheduler.after_step(state.version)

    async def _take(self, upcoming: Awaitable[TakenBatch]) -> TakenBatch:
        if self.barrier is not None:
            self.barrier.open()
        self.state.awaits_batch = True
        taken = await self._stalls.until(upcoming)
        self.state.awaits_batch = False
        if self.barrier is not None:
            self.barrier.close()  # until the evaluation after this step is over
        return taken

    async def _step(self, batches: tuple[Batch, ...]) -> Stepped:
        await asyncio.gather(*(engines.pause() for engines in self.paused))
        stepped = await self.trainer.step(*batches, version=self.state.version + 1)
        # Publishing the weights is copying and needs no pause. After a step that failed the engines
        # stay paused, as it ends the run.
        await asyncio.gather(*(engines.resume() for engines in self.paused))
        return stepped
