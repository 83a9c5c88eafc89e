"""The flow of a run.

     tasks ─▶ generate ─▶ score ─▶ buffer ─▶ train ─▶ publish ─┐
      ▲                                                        │
      └─────────── swap, between two forward passes ◀──────────┘

Three activities run side by side on one event loop: the dispatcher fills the buffer, the training
loop empties it, and the broadcaster sends each new version to the engines. Torch-free: everything
heavy is a call to a worker. run/build.py makes the parts.

Promise: one batch is one step is one version; of several policies, of each that has tokens in the
batch. The next batch is taken while the current one is trained. A resumed run first repeats the
steps that its journal holds beyond its checkpoint, with the same batches.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from millrace.cluster.messages import Stepped
from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.controller.batches import Batches, TakenBatch
from millrace.controller.checkpointing import RunCheckpoints
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.evaluation import EvalScheduler
from millrace.controller.policies import PREFIX, OtherPolicy, VersionBroadcasts, step_all
from millrace.controller.preemption import Preemption
from millrace.controller.reporting import RunReporter, TrainingState
from millrace.core.errors import Preempted
from millrace.inference.lending import GpuLending
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.training.group import TrainerGroup


@dataclass(kw_only=True, eq=False)
class Controller:
    config: RunConfig
    state: TrainingState
    dispatcher: Dispatcher
    batches: Batches
    trainer: TrainerGroup
    broadcasts: VersionBroadcasts
    eval_scheduler: EvalScheduler
    checkpoints: RunCheckpoints
    reporter: RunReporter
    others: Sequence[OtherPolicy] = ()  # besides the first policy, which `trainer` trains
    lending: GpuLending = field(default_factory=GpuLending)
    preemption: Preemption = field(default_factory=Preemption)

    def __post_init__(self) -> None:
        self._stalls = StallWatchdog(
            limit_s=self.config.supervision.stall_timeout_s,
            explain=self.reporter.standstill,
            moved=lambda: sum(
                trainer.num_redone for trainer in {self.trainer, *(p.trainer for p in self.others)}
            ),
            warn=self.reporter.monitor.warn,
        )

    async def run(self) -> RunGauges:
        """Train, evaluate and checkpoint until the last step; returns the gauges at the end."""
        waiting = await self.batches.restore(self.state.version)
        with contextlib.closing(self.checkpoints.writer):
            async with asyncio.TaskGroup() as activities:
                monitor = self.reporter.monitor
                reporting = activities.create_task(monitor.run(self.reporter.gauges))
                await self.eval_scheduler.begin(activities)
                monitor.begin_training()
                dispatching = activities.create_task(self.dispatcher.run(waiting))
                broadcasting = self.broadcasts.begin(activities)
                self.checkpoints.writer.begin_uploads()
                if self._has_next:  # False after a crash that followed the last step
                    with self.preemption.deferred():
                        await self._train(activities)
                await self.lending.finish()
                dispatching.cancel()  # cancelling a group aborts its requests in the engines
                versions = self.batches.tracker.versions
                await self.broadcasts.reached(self.state.version, versions=versions)
                await self.eval_scheduler.finish()
                if self.broadcasts.notified is not None:
                    await self.broadcasts.notified.idle()
                await self.checkpoints.writer.finish_uploads()
                for task in (*broadcasting, reporting):
                    task.cancel()
        self.reporter.warn_of_failed_posts()
        return self.reporter.gauges()

    async def _train(self, activities: asyncio.TaskGroup) -> None:
        """The training loop: take a batch, step, record, checkpoint, evaluate."""
        state = self.state
        upcoming = activities.create_task(self.batches.next(state.version))
        while self._has_next:
            taken = await self._take(upcoming)
            if taken is None:
                break
            if state.version + 1 < self.config.trainer.steps:
                # For the version that this step makes, which the trainer has when it is used.
                activities.create_task(self.dispatcher.expire(state.version + 1))
                upcoming = activities.create_task(self.batches.next(state.version + 1))
            stepped = await self._stalls.until(self._step(taken, activities))
            await self.reporter.record(stepped, taken)
            state.version += 1
            self.batches.applied(taken, version=state.version, was_skipped=bool(stepped.skipped))
            await self.checkpoints.after_step(state.version, activities)
            if self._has_next and not self.preemption.is_requested:
                await self.eval_scheduler.after_step(state.version)
        if self._has_next:  # the run is to stop
            await self.checkpoints.save_now(state.version, activities)
            raise Preempted(f"{self.preemption.reason} stopped the run after step {state.version}.")

    @property
    def _has_next(self) -> bool:
        return self.state.version < self.config.trainer.steps

    async def _take(self, upcoming: asyncio.Task[TakenBatch]) -> TakenBatch | None:
        """The next batch; None if the run is to stop."""
        barrier = self.dispatcher.barrier
        if barrier is not None:
            barrier.open()
        self.state.awaits_batch = True
        taken = await self._stalls.until(self.preemption.unless_requested(upcoming))
        self.state.awaits_batch = False
        if barrier is not None:
            barrier.close()  # until the evaluation after this step is over
        return taken

    async def _step(self, taken: TakenBatch, activities: asyncio.TaskGroup) -> Stepped:
        self.state.step_began_s = self.reporter.monitor.now()
        await self.lending.take_back()
        version = self.state.version + 1
        stepped = await step_all(self.trainer, self.others, taken, version=version)
        # Publishing the weights is copying and needs no pause. After a step that failed the engines
        # stay paused, as it ends the run.
        await self.lending.lend(activities)
        versions = {
            f"{PREFIX}/{name}/version": float(
                self.batches.tracker.versions.at(version, policy=name)
            )
            for name in self.config.policies
        }
        metrics = {**stepped.metrics, **versions, **self.lending.metrics}
        return msgspec.structs.replace(stepped, metrics=metrics)
