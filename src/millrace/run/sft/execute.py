"""`mr.sft`: supervised fine-tuning, from settings to checkpoint.

Processes, restarts, checkpoints and metrics are those of `mr.train`, without engines and scorers.
Sections about generation ([scorers], [sampling], [engine], ...) are ignored, so a file may hold the
settings of both commands. Settings and data are checked before any worker starts.
Promise: each example is trained exactly once per epoch, also if processes were killed: steps since
the newest checkpoint are repeated with the same batches, and have one row of metrics each.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from millrace.cluster.messages import Stepped
from millrace.config import EngineConfig, JournalConfig, RunConfig, WeightsConfig
from millrace.config.keywords import TrainArguments
from millrace.controller.checkpointing import Checkpointing
from millrace.core.errors import CheckpointError, ConfigError, Preempted
from millrace.core.microbatch import Batch
from millrace.environments.rollouts.renderer import Renderer
from millrace.monitoring.files.episodes import SkippedSteps
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.run import prepare
from millrace.run.checks import check_plugins, check_tasks
from millrace.run.cluster import check_cluster
from millrace.run.execution.execute import RunProcesses, RunResult, StartedRun
from millrace.run.mesh_checks import check_mesh
from millrace.run.resume import find_resume_point
from millrace.run.sft import examples
from millrace.run.train import ConfigLike, Run, finish
from millrace.tasks.loading import load_section, load_sources, make_stream
from millrace.training.group import StepsOnRecord, TrainerGroup
from millrace.training.losses.recipes import SUPERVISED

FULL_LEARNING_RATE = 1e-5
LORA_LEARNING_RATE = 1e-4
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
    return finish(FineTuning(config, **arguments), resume=resume)


class FineTuning(Run):
    def __init__(self, config: ConfigLike = None, **arguments: Unpack[TrainArguments]) -> None:
        super().__init__(config, **arguments)
        if self._arguments.pop("scorers") or self._arguments.pop("environment") is not None:
            raise ConfigError("mr.sft has no scorers and no environment; remove these arguments.")
        self._arguments["kind"] = SftRun


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSft(prepare.PreparedRun):
    data: examples.SupervisedData


def prepare_sft(
    config: RunConfig,
    *,
    tasks: Sequence[Any] | None = None,
    eval_tasks: Sequence[Any] | None = None,
    resume: bool = False,
) -> PreparedSft:
    given, config = config, supervised_settings(config)
    check_tasks(config)
    check_mesh(config)
    check_cluster(config)
    _check_trainer(config)
    sources = load_sources(config.tasks, tasks)
    train_tasks = [task for source in sources for task in source.tasks]
    held_out = load_section(config.evaluate, eval_tasks, section="evaluate")
    examples.check_examples([*train_tasks, *held_out])
    check_plugins(config)
    config, num_examples = _with_steps(config, num_tasks=len(train_tasks))
    # Files of the model are read from here on, which imports torch.
    tokenizer, max_tokens = prepare.read_model(config.model, wanted=config.engine.max_context)
    config, processes, devices = prepare.place(config, ())
    notes, warnings = prepare.check_model(config), prepare.check_files(config)
    renderer = Renderer(tokenizer, template_settings=config.environment.template)
    renderer.check([*train_tasks, *held_out])
    stream = make_stream(sources, config.tasks, seed=config.seed)
    point = find_resume_point(config, stream, resume=resume)
    size = config.trainer.groups_per_step
    # The last batch of fewer epochs may have been short.
    if not 0 <= point.cursor.version * size - point.cursor.next_number < size:
        raise ConfigError(
            f"{config.run_dir} was begun with another trainer.groups_per_step than {size}, or by"
            " `millrace train`; resume it as it was begun."
        )
    return PreparedSft(
        config=config,
        given=given,
        processes=processes,
        devices=devices,
        tasks=stream,
        held_out=tuple(held_out[: config.evaluate.max_tasks]),
        tokenizer=tokenizer,
        renderer=renderer,
        max_context=max_tokens,
        notes=notes,
        **point._replace(warnings=(*point.warnings, *warnings))._asdict(),
        data=examples.SupervisedData(
            config=config,
            stream=stream,
            num_examples=num_examples,
            encoder=examples.ExampleEncoder(
                renderer, eos_id=tokenizer.eos_token_id, max_tokens=max_tokens
            ),
            cursor=point.cursor,
        ),
    )


def supervised_settings(config: RunConfig) -> RunConfig:
    """The settings without what generation needs, and with the loss of fine-tuning."""
    rate = config.optimizer.learning_rate
    if rate == "auto":
        rate = FULL_LEARNING_RATE if config.lora is None else LORA_LEARNING_RATE
    return config.updated(
        loss={"type": SUPERVISED},
        scorers=(),
        critic=None,
        policies={},
        engine=EngineConfig(count=0, max_context=config.engine.max_context),
        weights=WeightsConfig(),
        journal=JournalConfig(max_bytes=0),  # a step's batch follows from its number
        optimizer={"learning_rate": rate},
        environment={"models": {}, "remote": 0},
        evaluate={"engines": 0},
    )


def _check_trainer(config: RunConfig) -> None:
    trainer = config.trainer
    refused = {
        "trainer.epochs": (trainer.epochs, 1, "passes over the data are tasks.epochs"),
        "trainer.minibatches": (trainer.minibatches, 1, "a step has one batch"),
        "trainer.router_aux_loss": (trainer.router_aux_loss, 0, "no engine records expert routes"),
        "tasks.order": (config.tasks.order == "curriculum", False, "a curriculum needs scores"),
    }
    for setting, (found, wanted, reason) in refused.items():
        if found != wanted:
            raise ConfigError(f"{setting} does not fit `millrace sft`: {reason}; leave it out.")


def _with_steps(config: RunConfig, *, num_tasks: int) -> tuple[RunConfig, int]:
    """The settings with the number of steps, and the number of examples that these take."""
    size, epochs = config.trainer.groups_per_step, config.tasks.epochs
    if epochs is None:
        return config, config.trainer.steps * size
    num_examples = max(1, round(epochs * num_tasks))
    steps = math.ceil(num_examples / size)
    return config.updated(trainer={"steps": steps}), num_examples


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
        self._writer = Checkpointing(
            trainer,
            folder=self.run_dir.checkpoints,
            version=self._version,
            warn=self._monitor.warn,
            settings=self._config.checkpoint,
        )
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
        upcoming: asyncio.Task[examples.SupervisedBatch] | None = None
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
        if self._has_next:
            with contextlib.suppress(CheckpointError):  # a warning has said so
                await writer.finish_uploads()
            raise Preempted(f"{self.preemption.reason} stopped the run after step {self._version}.")
        await writer.finish_uploads()

    @property
    def _has_next(self) -> bool:
        return self._version < self._config.trainer.steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._version % every == 0

    def _next_batch(
        self, activities: asyncio.TaskGroup, *, ahead: int = 1
    ) -> asyncio.Task[examples.SupervisedBatch]:
        making = asyncio.to_thread(self._data.batch, self._version + ahead)
        return activities.create_task(making)

    def _record(self, stepped: Stepped, taken: examples.SupervisedBatch) -> None:
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

    async def _save(
        self, writer: Checkpointing, activities: asyncio.TaskGroup, *, is_last: bool
    ) -> None:
        version = self._version

        def saved() -> None:
            self._saved = version
            self._monitor.saved(self.run_dir.checkpoints / f"step_{version}")

        next_number = self._data.next_number(version)
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
