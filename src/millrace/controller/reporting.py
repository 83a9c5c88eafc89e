"""What a run reports: its gauges, a metrics row for each step, skipped steps, and why it stalls.

Runs on the controller's event loop.
"""

import asyncio
import time
from dataclasses import dataclass
from statistics import fmean

from millrace.cluster.messages import Stepped
from millrace.config import RunConfig
from millrace.controller.admission import RUNNING
from millrace.controller.batches import TakenBatch
from millrace.controller.checkpointing import CheckpointUploads
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.evaluation import EvalSet
from millrace.core.records import Group
from millrace.monitoring.activity import SCORES, queue_text
from millrace.monitoring.files.episodes import SkippedSteps, StepLife
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.monitoring.terminal.text import counts
from millrace.training.packing.packer import minibatches_of
from millrace.weights.broadcaster import HttpNotifier


@dataclass(kw_only=True, slots=True)
class TrainingState:
    """Written by the training loop, read by the gauges."""

    version: int  # of the policy; one step makes one version
    awaits_batch: bool = False  # the trainer is idle
    step_began_s: float = 0.0  # the last one, on the monitor's clock


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunReporter:
    config: RunConfig
    monitor: RunMonitor
    skipped: SkippedSteps
    state: TrainingState
    dispatcher: Dispatcher
    eval_set: EvalSet
    notifier: HttpNotifier | None
    uploads: CheckpointUploads | None = None

    def gauges(self) -> RunGauges:
        flow, tracker = self.dispatcher, self.dispatcher.tracker
        return RunGauges(
            version=self.state.version,
            buffer_depth=flow.buffer.depth,
            groups_running=flow.admission.running,
            groups_dropped=dict(tracker.dropped),
            groups_cancelled=dict(tracker.cancellations.by_reason),
            tokens_wasted={**tracker.waste.tokens, **flow.scorers.tokens_wasted},
            wasted_staleness=tracker.waste.staleness_means,
            tokens_saved=round(tracker.cancellations.tokens_saved),
            groups_failed=dict(tracker.failures.by_reason),
            steps_skipped=self.skipped.num_steps,
            last_failure=tracker.failures.last_error,
            engine_waits_for=self._engine_waits_for(),
            trainer_waits_for=self._trainer_waits_for(),
            scorers=flow.scorers.loads(),
            sequences_resumed=flow.engines.num_resumed,
            resumed_tokens=flow.partials.num_resumed,
            evaluating=self.eval_set.progress,
        )

    async def record(self, stepped: Stepped, taken: TakenBatch) -> None:
        """Write the metrics row of a step; raises RunFailed if too many steps were skipped."""
        await self._save_skipped(stepped, taken.groups)
        metrics = {
            **stepped.metrics,
            "trainer/balance": fmean(batch.balance for batch in taken.batches),
            "buffer/wait_s": self.dispatcher.buffer.wait_s,
            "buffer/admission_held_s": sum(self.dispatcher.admission.held_s.values()),
        }
        if self.notifier is not None:
            metrics["weights/notify_failures"] = float(self.notifier.num_failed)
        if self.uploads is not None:
            metrics["checkpoint/upload_failures"] = float(self.uploads.num_failed)
        await self.monitor.recorder.written()
        self.monitor.step(
            self.gauges(),
            groups=taken.groups,
            replayed=taken.replayed,
            trainer_metrics=metrics,
            versions=self.dispatcher.tracker.versions,
        )
        life = StepLife(
            step=stepped.version,
            begin_s=self.state.step_began_s,
            end_s=self.monitor.now(),
            unix_s=round(time.time(), 3),
            groups=[group.life for group in taken.groups if group.life is not None],
            replayed=sorted(taken.replayed),
            lost=list(self.dispatcher.tracker.lost),
        )
        self.dispatcher.tracker.lost.clear()
        self.monitor.recorder.write(life, taken.fresh, stepped.reported)
        self.skipped.check(stepped.metrics)

    def warn_of_failed_posts(self) -> None:
        if self.notifier is not None and self.notifier.num_failed:
            self.monitor.warn(f"{self.notifier.num_failed} posts to weights.notify failed.")

    def standstill(self) -> str:
        """Why nothing moves, for a warning."""
        gauges = self.gauges()
        at_scorers = f" In scoring: {queue_text(gauges.scorers)}."
        return (
            f"the trainer waits for {gauges.trainer_waits_for}, the engines for"
            f" {gauges.engine_waits_for}; {gauges.groups_running} groups are running,"
            f" {gauges.buffer_depth} are buffered, and dropped so far:"
            f" {counts(gauges.groups_dropped)}."
            f"{at_scorers if gauges.trainer_waits_for == SCORES else ''}"
        )

    async def _save_skipped(self, stepped: Stepped, groups: list[Group]) -> None:
        if not stepped.skipped:
            self.skipped.reset_streak()
            return
        trainer = self.config.trainer
        parts = minibatches_of(groups, num_minibatches=trainer.minibatches)
        num_updates = len(parts) * trainer.epochs
        bad = sorted({index % len(parts) for index in stepped.skipped})
        if self.config.policies:  # each has batches of its own
            bad = list(range(len(parts)))
        groups = [group for index in bad for group in parts[index]]
        path = await asyncio.to_thread(self.skipped.write, stepped.version, groups)
        which = f" ({len(stepped.skipped)} of its {num_updates} updates)" if num_updates > 1 else ""
        self.monitor.warn(
            f"step {stepped.version}{which} was skipped: its loss or gradient is not finite; its"
            f" groups are in {path}."
        )

    def _engine_waits_for(self) -> str:
        buffer, held_by = self.dispatcher.buffer, self.dispatcher.admission.held_by
        if buffer.depth >= buffer.capacity:
            return "buffer full"
        if held_by is None:
            return "tasks"
        # At the staleness limit, the trainer may itself wait for groups that are being scored.
        is_scoring = self.dispatcher.scoring > 0
        is_behind = is_scoring and (held_by == RUNNING or self.state.awaits_batch)
        return SCORES if is_behind else held_by

    def _trainer_waits_for(self) -> str:
        if self.dispatcher.scoring > self.dispatcher.generating:
            return SCORES
        return "generation" if self.dispatcher.generating else "next batch"
