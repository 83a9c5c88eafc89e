"""The flow of a run.

     tasks ─▶ generate ─▶ score ─▶ buffer ─▶ train ─▶ publish ─┐
      ▲                                                        │
      └─────────── swap, between two forward passes ◀──────────┘

Three activities run side by side on one event loop: the dispatcher fills the buffer, the learner
empties it, and the broadcaster sends each new version to the engines. Torch-free: everything heavy
is a call to a worker. run/build.py makes the parts.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from millrace.controller.batches import Batches
from millrace.controller.checkpointing import RunCheckpoints
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.eval_schedule import EvalScheduler
from millrace.controller.evaluation import Evaluation
from millrace.controller.learner import Learner
from millrace.controller.reporting import LearnerState, RunReporter
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.training.group import TrainerGroup
from millrace.weights.broadcaster import Subscription, VersionBroadcaster


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    steps: int
    before: Evaluation | None
    after: Evaluation | None
    checkpoint: Path
    gauges: RunGauges  # at the end


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Controller:
    """The parts of a run."""

    batches: Batches
    dispatcher: Dispatcher
    learner: Learner
    state: LearnerState
    trainer: TrainerGroup
    broadcaster: VersionBroadcaster
    engine_versions: Subscription  # of the rollout engines
    notified_versions: Subscription | None  # of external engines
    eval_scheduler: EvalScheduler
    checkpoints: RunCheckpoints
    reporter: RunReporter

    async def run(self) -> Outcome:
        """Train, evaluate and checkpoint until the last step."""
        waiting = await self.batches.restore(self.state.version)
        with contextlib.closing(self.checkpoints.writer):
            async with asyncio.TaskGroup() as activities:
                monitor = self.reporter.monitor
                reporting = activities.create_task(monitor.run(self.reporter.gauges))
                await self.eval_scheduler.begin(activities)
                monitor.begin_training()
                dispatching = activities.create_task(self.dispatcher.run(waiting))
                broadcasting = activities.create_task(self.broadcaster.run(self.trainer))
                await self.learner.run(activities)
                dispatching.cancel()  # cancelling a group aborts its requests in the engines
                await self.engine_versions.reached(self.state.version)
                await self.eval_scheduler.finish()
                if self.notified_versions is not None:
                    await self.notified_versions.idle()
                broadcasting.cancel()
                reporting.cancel()
        self.reporter.warn_of_failed_posts()
        newest = self.checkpoints.writer.newest
        assert newest is not None
        return Outcome(
            steps=self.state.version,
            before=self.eval_scheduler.before,
            after=self.eval_scheduler.after,
            checkpoint=newest,
            gauges=self.reporter.gauges(),
        )
