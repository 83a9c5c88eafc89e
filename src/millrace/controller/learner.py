"""The learn loop: take a batch, step, write down what came of it, save.

Promise: one batch is one step is one version, and Version counts here alone. The next batch is
taken while this one is learned. A resumed run first redoes the steps that its journal has beyond
its checkpoint: they are taken as they were. Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cluster.messages import Stepped
from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.controller.barrier import SyncBarrier
from millrace.controller.batches import Batches, Taken
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.eval_schedule import EvalScheduler
from millrace.core.microbatch import Batch
from millrace.core.records import Group
from millrace.inference.pool import EnginePool
from millrace.journal import Journal, NoJournal
from millrace.monitoring.files.skipped_steps import SkippedSteps
from millrace.monitoring.monitor import SCORES, RunGauges, RunMonitor
from millrace.monitoring.scorer_load import queue_text
from millrace.monitoring.terminal.text import counts
from millrace.training.checkpoints.schedule import Checkpointing
from millrace.training.group import TrainerGroup
from millrace.training.packing.packer import minibatches_of
from millrace.weights.http_notifier import HttpNotifier


class Learner:
    def __init__(
        self,
        config: RunConfig,
        *,
        version: int,
        batches: Batches,
        journal: Journal | NoJournal,
        trainer: TrainerGroup,
        dispatcher: Dispatcher[Any],
        examiner: EvalScheduler,
        notifier: HttpNotifier,
        rounds: SyncBarrier | None,
        pools: Sequence[EnginePool],
        watcher: RunMonitor,
        skipped: SkippedSteps,
        checkpoints: Path,
        moment: Callable[[], RunGauges],
        expire: Callable[[int], Coroutine[Any, Any, None]],
        run_state: Callable[[], dict[str, Any]],
        resumed_at: int | None,
    ) -> None:
        """`pools` are the engines that pause during a step. `expire` is told which version the next
        take is for, and gives up what is too old for it; `run_state` is what a checkpoint holds
        besides the trainer's own. `resumed_at` is the journal's position of the checkpoint that
        the run goes on from."""
        self._config = config
        self._batches = batches
        self._journal = journal
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._examiner = examiner
        self._notifier = notifier
        self._rounds = rounds
        self._pools = pools
        self._watcher = watcher
        self._skipped = skipped
        self._moment = moment
        self._expire = expire
        self._run_state = run_state
        self._stalls = StallWatchdog(
            warn_after_s=config.supervision.stall_warning_s,
            limit_s=config.cluster.stall_timeout_s,
            explain=self._standstill,
            moved=lambda: trainer.num_redone,
            warn=watcher.warn,
        )
        self.version = version  # of the trainer
        self.awaits_batch = False  # the trainer has nothing to do
        self._checkpointing = Checkpointing(
            trainer, folder=checkpoints, version=version, warn=watcher.warn
        )
        self._covered = _Covered(version=version, position=resumed_at)
        self._to_cover: _Covered | None = None
        self._covering: asyncio.Task[None] | None = None
        self._activities: asyncio.TaskGroup | None = None  # once it runs

    @property
    def newest_checkpoint(self) -> Path | None:
        return self._checkpointing.newest

    def close(self) -> None:
        self._checkpointing.close()

    async def run(self, activities: asyncio.TaskGroup) -> None:
        """Until the last step."""
        self._activities = activities
        steps = self._config.trainer.steps
        if self.version == steps:
            return  # all but the end of the run was done before a crash
        upcoming = activities.create_task(self._batches.next(self.version))
        while self.version < steps:
            taken = await self._take(upcoming)
            if self.version + 1 < steps:
                # Fit for the version this step makes, which is the trainer's when it is used.
                activities.create_task(self._expire(self.version + 1))
                upcoming = activities.create_task(self._batches.next(self.version + 1))
            stepped = await self._stalls.until(self._step(taken.batches))
            await self._record(stepped, taken)
            self.version += 1
            self._dispatcher.finish(group.number for group in taken.fresh)
            self._batches.applied(taken, version=self.version, was_skipped=bool(stepped.skipped))
            await self._after_step()

    async def _take(self, upcoming: Awaitable[Taken]) -> Taken:
        if self._rounds is not None:
            self._rounds.open()
        self.awaits_batch = True
        taken = await self._stalls.until(upcoming)
        self.awaits_batch = False
        if self._rounds is not None:
            self._rounds.close()  # until this step's evaluation is over
        return taken

    async def _step(self, batches: tuple[Batch, ...]) -> Stepped:
        """Learn one batch, while the engines of `pools` pause; evaluations that are under way go on
        between two steps."""
        await asyncio.gather(*(pool.pause() for pool in self._pools))
        stepped = await self._trainer.step(*batches, version=self.version + 1)
        # Before the weights are published, which is copying and needs no turn of its own.
        # After a step that failed nobody resumes them: it ends the run.
        await asyncio.gather(*(pool.resume() for pool in self._pools))
        return stepped

    async def _record(self, stepped: Stepped, taken: Taken) -> None:
        await self._save_skipped(stepped, taken.groups)
        metrics = dict(stepped.metrics)
        if self._config.weights.notify:
            metrics["weights/notify_failures"] = float(self._notifier.num_failed)
        self._watcher.step(
            self._moment(), groups=taken.groups, replayed=taken.replayed, trainer_metrics=metrics
        )
        self._skipped.check(stepped.metrics)

    async def _save_skipped(self, stepped: Stepped, groups: list[Group]) -> None:
        if not stepped.skipped:
            self._skipped.went_well()
            return
        parts = minibatches_of(groups, num_minibatches=self._config.trainer.minibatches)
        num_updates = len(parts) * self._config.trainer.epochs
        bad = sorted({index % len(parts) for index in stepped.skipped})
        groups = [group for index in bad for group in parts[index]]
        path = await asyncio.to_thread(self._skipped.write, stepped.version, groups)
        which = f" ({len(stepped.skipped)} of its {num_updates} updates)" if num_updates > 1 else ""
        self._watcher.warn(
            f"step {stepped.version}{which} was skipped: its loss or gradient is not finite; what"
            f" it was given is in {path}."
        )

    async def _after_step(self) -> None:
        """Checkpoint and evaluate when due."""
        last = self.version == self._config.trainer.steps
        due = _due(self.version, self._config.checkpoint.every_steps)
        is_large = self._journal.is_too_large and not self._checkpointing.is_writing
        if last or due or is_large:
            await self._save(is_last=last)
        if not last:
            await self._examiner.after_step(self.version)

    async def _save(self, *, is_last: bool) -> None:
        at = _Covered(version=self.version, position=self._journal.position)
        run_state = {"version": self.version, "journal": at.position, **self._run_state()}
        await self._journal.flush()  # no checkpoint is ahead of it
        save = self._checkpointing.save_last if is_last else self._checkpointing.save
        await save(self.version, run_state=run_state, on_saved=lambda: self._begin_cover(at))

    def _begin_cover(self, at: "_Covered") -> None:
        """There is a good checkpoint now. The journal still reaches back to the one before it,
        where that is kept and there is room, should the new one be damaged later."""
        assert self._activities is not None
        before, self._covered = self._covered, at
        is_only_one = self._config.checkpoint.keep == 1 or self._journal.is_too_large
        self._to_cover = at if is_only_one else before
        if self._covering is None or self._covering.done():
            self._covering = self._activities.create_task(self._cover())

    async def _cover(self) -> None:
        """One at a time: checkpoints that come meanwhile are covered by the newest of them."""
        while (covered := self._to_cover) is not None:
            self._to_cover = None
            if covered.position is not None:
                await self._journal.discard_covered(
                    covered.version, position=covered.position, keep=self._batches.may_return
                )

    def _standstill(self) -> str:
        moment = self._moment()
        return (
            f"the trainer waits for {moment.trainer_waits_for}, the engines for"
            f" {moment.engine_waits_for}; {moment.groups_running} groups are running,"
            f" {moment.buffer_depth} are buffered, and dropped so far:"
            f" {counts(moment.groups_dropped)}.{_at_scorers(moment)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Covered:
    """A checkpoint, and how far the journal was when it was made."""

    version: int
    position: int | None


def _at_scorers(moment: RunGauges) -> str:
    """Where the groups are that the trainer waits for, if they are there."""
    if moment.trainer_waits_for != SCORES:
        return ""
    return f" In scoring: {queue_text(moment.scorers)}."


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
