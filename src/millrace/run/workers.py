"""The engines and the trainer of one run.

Promise: an engine that dies is restarted with the newest weights. A trainer that dies is restarted
from the last checkpoint and repeats the steps since then with the same batches; calls to it wait
meanwhile. Engines can be added and removed while the run lasts.

Runs on the controller's event loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from millrace.cluster.supervision.pool import RESTARTING, WorkerPool
from millrace.cluster.supervision.replica import WorkerReplica
from millrace.cluster.worker import Worker
from millrace.config import EngineConfig, RunConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import Engine
from millrace.core.records import WeightUpdate
from millrace.inference.backend import load_backend
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EngineReplica
from millrace.run.launch import Launcher
from millrace.training.checkpoints.directory import newest_checkpoint, read_run_state
from millrace.training.group import TrainerGroup
from millrace.training.past_steps import StepsInMemory

MIN_STEP_TIMEOUT_S = 3600.0  # a trainer that hangs is found earlier, by supervision.hang_timeout_s
SAVE_TIMEOUT_S = 1800.0  # until a checkpoint is on the disk, which may be a slow network disk
OPEN_TO_HOSTS = "Another host can take its place: run `millrace join` there."


class RunWorkers:
    def __init__(
        self,
        config: RunConfig,
        *,
        worker_pool: WorkerPool,
        launcher: Launcher,
        checkpoint: Path | None,
        version: int,
        on_restored: Callable[[WeightUpdate], None],
    ) -> None:
        """`checkpoint` that the run resumes from, which holds `version`.

        `on_restored` gets the newest version, and must release it, after a trainer was restarted.
        """
        self._config = config
        self._worker_pool = worker_pool
        self._launcher = launcher
        self.engines = EnginePool(replaces=True)
        self.evaluators = EnginePool(replaces=True) if config.evaluate.engines else None
        self.models = {name: EnginePool(replaces=True) for name in config.environment.models}
        """Models besides the policy, by name; their weights never change."""
        self._trainer = _TrainerReplica(
            config,
            launcher=launcher,
            checkpoint=checkpoint,
            version=version,
            on_restored=on_restored,
        )
        self._rollout_engines: list[str] = []  # names
        self._numbers = itertools.count(config.engine.count + config.engine.remote)

    @property
    def trainer(self) -> TrainerGroup:
        return self._trainer.trainer

    @property
    def engine_names(self) -> list[str]:
        """Engines of the rollouts, serving or restarting."""
        return list(self._rollout_engines)

    async def start(self, *others: Awaitable[object]) -> None:
        """Start all workers concurrently, and await `others` beside them."""
        num_local, num_remote = self._config.engine.count, self._config.engine.remote
        add = self._worker_pool.add
        async with asyncio.TaskGroup() as starting:
            for i in range(num_local + num_remote):
                name, is_remote = f"engine-{i}", i >= num_local
                self._rollout_engines.append(name)
                engine = self._engine(name, pool=self.engines, is_remote=is_remote)
                remedy = OPEN_TO_HOSTS if is_remote else RESTARTING
                starting.create_task(add(engine, remedy=remedy))
            for i in range(self._config.evaluate.engines):
                assert self.evaluators is not None
                starting.create_task(add(self._engine(f"evaluator-{i}", pool=self.evaluators)))
            for model, settings in self._config.environment.models.items():
                for i in range(settings.engine.count):
                    starting.create_task(add(self._model_engine(f"model-{model}-{i}", model)))
            starting.create_task(add(self._trainer))
            for other in others:
                starting.create_task(_awaited(other))

    async def add_engine(self) -> str:
        """Start one more engine on this host; returns its name."""
        name = f"engine-{next(self._numbers)}"
        await self._worker_pool.add(self._engine(name, pool=self.engines, joins_late=True))
        self._rollout_engines.append(name)
        return name

    async def remove_engine(self, name: str) -> None:
        """Let an engine finish its sequences, then stop it for good."""
        names = self._rollout_engines
        if name not in names:
            raise ConfigError(
                f"The run has no engine {name!r}; its engines are {', '.join(names)}."
            )
        if len(names) == 1:
            raise ConfigError(f"{name!r} is the last engine of the run; add another first.")
        names.remove(name)
        await self._worker_pool.remove(name)

    def _engine(
        self, name: str, *, pool: EnginePool, is_remote: bool = False, joins_late: bool = False
    ) -> EngineReplica:
        return self._replica(
            name,
            pool=pool,
            start=partial(self._start_remote if is_remote else self._start_local, name),
            load_newest=self._load_newest,
            engine=self._config.engine,
            joins_late=joins_late,
        )

    def _model_engine(self, name: str, model: str) -> EngineReplica:
        async def start(_is_late: bool) -> Worker:
            return await self._launcher.start_model(name, model=model)

        return self._replica(
            name,
            pool=self.models[model],
            start=start,
            load_newest=None,
            engine=self._config.environment.models[model].engine,
        )

    def _replica(
        self,
        name: str,
        *,
        pool: EnginePool,
        start: Callable[[bool], Awaitable[Worker]],
        load_newest: Callable[[Engine], Awaitable[None]] | None,
        engine: EngineConfig,
        joins_late: bool = False,
    ) -> EngineReplica:
        return EngineReplica(
            name,
            pool=pool,
            start=start,
            load_newest=load_newest,
            hang_timeout_s=self._config.supervision.hang_timeout_s,
            start_timeout_s=self._config.cluster.start_timeout_s,
            joins_late=joins_late,
            capabilities=load_backend(engine).capabilities,
        )

    async def _start_local(self, name: str, is_late: bool) -> Worker:
        return await self._launcher.start_engine(name, is_late=is_late)

    async def _start_remote(self, name: str, is_late: bool) -> Worker:
        timeout_s = None if is_late else self._config.cluster.join_timeout_s
        return await self._launcher.await_engine(name, timeout_s=timeout_s, is_late=is_late)

    async def _load_newest(self, engine: Engine) -> None:
        while True:
            async with self.trainer.lent() as update:
                try:
                    await engine.swap(update)
                    return
                except WeightError:
                    if not await self.trainer.is_lost(update):
                        raise


class _TrainerReplica(WorkerReplica):
    """The trainer process, restarted from the newest checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        *,
        launcher: Launcher,
        checkpoint: Path | None,
        version: int,
        on_restored: Callable[[WeightUpdate], None],
    ) -> None:
        super().__init__(
            "trainer",
            hang_timeout_s=config.supervision.hang_timeout_s,
            first_hang_timeout_s=config.cluster.start_timeout_s,
        )
        self._run_dir = Path(config.run_dir)
        # A run that may go without a step for longer has steps that take longer.
        self._step_timeout_s = max(MIN_STEP_TIMEOUT_S, config.cluster.stall_timeout_s)
        self._launcher = launcher
        self._checkpoint = checkpoint
        self._version = version  # of the weights that the process has loaded
        self._on_restored = on_restored
        self._trainer: TrainerGroup | None = None

    @property
    def trainer(self) -> TrainerGroup:
        assert self._trainer is not None, "the trainer is started first"
        return self._trainer

    async def launch(self, *, is_restart: bool) -> Worker:
        checkpoint = self._checkpoint
        if is_restart:
            found = await asyncio.to_thread(newest_checkpoint, self._run_dir)
            checkpoint = found.directory or self._checkpoint
            self._version = 0 if checkpoint is None else int(read_run_state(checkpoint)["version"])
        return await self._launcher.start_trainer(checkpoint)

    async def attach(self, worker: Worker, *, is_restart: bool) -> None:
        if is_restart:
            self._on_restored(await self.trainer.replace([worker], version=self._version))
            return
        self._trainer = TrainerGroup(
            [worker],
            past=StepsInMemory(version=self._version),
            step_timeout_s=self._step_timeout_s,
            save_timeout_s=SAVE_TIMEOUT_S,
        )

    def detach(self) -> None:
        self.trainer.lose()


async def _awaited(work: Awaitable[object]) -> None:
    await work
