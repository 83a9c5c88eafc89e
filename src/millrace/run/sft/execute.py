"""`mr.sft`: supervised fine-tuning, from settings to checkpoint.

Processes, restarts, checkpoints and metrics are those of `mr.train`, without engines and scorers.
Promise: each example is trained exactly once per epoch, also if processes were killed: steps since
the newest checkpoint are repeated with the same batches, and have one row of metrics each.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Unpack

from millrace.cluster.messages import Stepped
from millrace.config.keywords import TrainArguments
from millrace.controller.checkpointing import Checkpointing, CheckpointUploads
from millrace.core.errors import ConfigError, Preempted
from millrace.core.microbatch import Batch
from millrace.monitoring.files.episodes import SkippedSteps
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.run.execution.execute import RunProcesses, RunResult, StartedRun, execute
from millrace.run.sft.examples import SupervisedBatch
from millrace.run.sft.prepare import PreparedSft, prepare_sft
from millrace.run.train import ConfigLike, read_arguments
from millrace.training.checkpoints.store import CheckpointStore
from millrace.training.group import StepsOnRecord, TrainerGroup

# Metrics that compare the trainer with an engine.
_OF_ENGINES = ("ratio/", "mismatch/", "batch/proximal_microbatches")


def sft(
    config: ConfigLike = None, *, resume: bool = False, **arguments: Unpack[TrainArguments]
) -> RunResult:
    """Fine-tune a model on examples; returns when the last step is done and its checkpoint written.

    Settings come from a TOML file or a dict, and keyword arguments override them, as in mr.train.
    `tasks` and `eval_tasks` are examples: {"messages": [...]}, whose assistant turns are trained,
    or {"prompt": ..., "completion": ...}. `callbacks` have hooks of mr.Callback.
    """
    given = read_arguments(config, **arguments)
    if given.pop("scorers") or given.pop("environment") is not None:
        raise ConfigError("mr.sft has no scorers and no environment; remove these arguments.")
    work = partial(execute, kind=SftRun, **given, resume=resume)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="millrace-sft") as thread:  # as in a notebook
        return thread.submit(work).result()


class SftRun(RunProcesses):
    """A run whose only worker is the trainer, and its loop."""

    prepare: ClassVar = staticmethod(prepare_sft)
    curve: ClassVar = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.prepared, PreparedSft)
        self._data = self.prepared.data
        self._version = self._saved = self.prepared.cursor.version  # done, and on the disk
        self._skipped = SkippedSteps(self.run_dir.skipped)
        self._held_out: Batch | None = None
        self._trained_tokens = 0

    @property
    def _evaluations(self) -> dict[str, Any]:
        return {}  # metrics.jsonl has the losses

    async def _work(self, started: StartedRun) -> RunGauges:
        trainer = started.workers.trainer
        trainer.publishes = False
        trainer.past = StepsOnRecord(self._data.redo, version=self._version)
        self._writer = self._build_writer(trainer)
        async with asyncio.TaskGroup() as activities:
            background = [
                activities.create_task(started.workers.worker_pool.run()),
                activities.create_task(self._monitor.run(self._gauges)),
                # It releases the weights of a restarted trainer, which no engine wants.
                activities.create_task(self._broadcaster.run(trainer)),
            ]
            with contextlib.closing(self._writer), self.preemption.deferred():
                await self._train(trainer, self._writer, activities)
            for task in background:
                task.cancel()
        return self._gauges()

    async def _train(
        self, trainer: TrainerGroup, writer: Checkpointing, activities: asyncio.TaskGroup
    ) -> None:
        """The loop: step, evaluate, record, checkpoint. The next batch is made during a step."""
        if self._version == 0 or not self._has_next:  # False after a crash after the last step
            await self._evaluate(trainer)
        self._monitor.begin_training()
        writer.begin_uploads()
        upcoming: asyncio.Task[SupervisedBatch] | None = None
        while self._has_next and not self.preemption.is_requested:
            taken = await (upcoming or self._next_batch(activities))
            step = trainer.step(taken.batch, version=self._version + 1)
            stepping = activities.create_task(step)
            if self._version + 1 < self._config.trainer.steps:
                upcoming = self._next_batch(activities, ahead=2)
            stepped = await stepping
            self._version += 1
            if not self._has_next or self._is_due(self._config.evaluate.every_steps):
                await self._evaluate(trainer)
            # Before the checkpoint: a resumed run writes the rows after its checkpoint.
            self._record(stepped, taken)
            if not self._has_next or self._is_due(self._config.checkpoint.every_steps):
                await self._save(writer, activities, is_last=not self._has_next)
        await writer.finish_writing()
        if self._saved < self._version:  # the run is to stop
            await self._save(writer, activities, is_last=True)
        await writer.finish_uploads()
        if self._has_next:
            raise Preempted(f"{self.preemption.reason} stopped it after step {self._version}.")

    @property
    def _has_next(self) -> bool:
        return self._version < self._config.trainer.steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._version % every == 0

    def _next_batch(
        self, activities: asyncio.TaskGroup, *, ahead: int = 1
    ) -> asyncio.Task[SupervisedBatch]:
        making = asyncio.to_thread(self._data.batch, self._version + ahead)
        return activities.create_task(making)

    def _record(self, stepped: Stepped, taken: SupervisedBatch) -> None:
        metrics = {k: v for k, v in stepped.metrics.items() if not k.startswith(_OF_ENGINES)}
        self._trained_tokens += taken.batch.num_trained_tokens
        self._monitor.supervised_step(
            self._version,
            num_examples=taken.num_examples,
            trained_tokens=self._trained_tokens,
            metrics={**metrics, "trainer/balance": taken.batch.balance, "batch/cut": taken.num_cut},
        )
        if not stepped.skipped:
            self._skipped.reset_streak()
            return
        path = self._skipped.write(self._version, taken.groups)
        self._monitor.warn(
            f"step {self._version} was skipped: its loss or gradient is not finite; its examples"
            f" are in {path}."
        )
        self._skipped.check(stepped.metrics)

    async def _evaluate(self, trainer: TrainerGroup) -> None:
        """Measure the held-out loss, if there are held-out examples."""
        if not (tasks := self.prepared.held_out):
            return
        if self._held_out is None:
            packed = await asyncio.to_thread(self._data.packed, tasks, "[evaluate]")
            self._held_out = packed.batch
        loss = await trainer.held_out_loss(self._held_out, version=self._version)
        self._monitor.evaluated({"eval/loss": loss, "eval/step": self._version})

    def _build_writer(self, trainer: TrainerGroup) -> Checkpointing:
        saving, warn, uploads = self._config.checkpoint, self._monitor.warn, None
        if saving.path is not None:
            uploads = CheckpointUploads(CheckpointStore(saving.path), keep=saving.keep, warn=warn)
        folder, version = self.run_dir.checkpoints, self._version
        return Checkpointing(trainer, folder=folder, version=version, warn=warn, uploads=uploads)

    async def _save(
        self, writer: Checkpointing, activities: asyncio.TaskGroup, *, is_last: bool
    ) -> None:
        version = self._version

        def saved() -> None:
            self._saved = version
            self._monitor.saved(self.run_dir.checkpoints / f"step_{version}")

        next_number = version * self._config.trainer.groups_per_step
        await writer.save(
            version,
            run_state={"version": version, "next_number": next_number, "unfinished": []},
            on_saved=saved,
            is_last=is_last,
            activities=activities,
        )

    def _gauges(self) -> RunGauges:
        num_skipped = self._skipped.num_steps
        return RunGauges(version=self._version, steps_skipped=num_skipped, trainer_waits_for="data")
