"""The engines and the trainer of one run: their start, their replacements, and their number.

Promise: a worker that serves has loaded its model; one that could not load it has ended. An engine
that dies is restarted with the newest weights. A trainer of which a rank dies is restarted from the
last checkpoint and repeats the steps since then with the same batches; calls to it wait meanwhile.
Engines can be added and removed while the run lasts.

Runs on the controller's event loop.
"""

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message, StartEngine, StartTrainer
from millrace.cluster.mps import below_normal
from millrace.cluster.supervision.group import GroupReplica
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import EngineConfig, RunConfig, WeightsConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import Engine
from millrace.core.records import WeightUpdate
from millrace.inference.backend import load_backend
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EngineReplica
from millrace.run.prepare import PreparedRun
from millrace.training.checkpoints.directory import newest_checkpoint, read_run_state
from millrace.training.group import StepsInMemory, TrainerGroup

MIN_STEP_TIMEOUT_S = 3600.0  # a trainer that hangs is found earlier, by supervision.hang_timeout_s
SAVE_TIMEOUT_S = 1800.0  # until a checkpoint is on the disk, which may be a slow network disk
OPEN_TO_HOSTS = "Another host can take its place: run `millrace join` there."

Start = Callable[[str, bool], Awaitable[Worker]]  # name, whether it joins or restarts late


@dataclass(kw_only=True, eq=False)
class RunWorkers:
    prepared: PreparedRun
    hub: Hub
    worker_pool: WorkerPool
    # Environment of engines and the trainer. Scorers do not get it: they may be killed at any time,
    # and with MPS such a death disturbs every process on that GPU.
    gpu_env: Mapping[str, str]
    on_phase: Callable[[str, str | None], None]  # worker, start-up phase; None when it is ready
    # Gets the newest version, and must release it, after a trainer was restarted.
    on_restored: Callable[[WeightUpdate], None]

    def __post_init__(self) -> None:
        config = self._config = self.prepared.config
        adapters = {name: _absolute(path) for name, path in config.engine.adapters.items()}
        engine = config.engine.model_copy(update={"adapters": adapters})
        threads = {"threads": self.prepared.remote_threads}
        cluster = config.cluster.model_copy(update=threads)
        self._remote_config = config.model_copy(update={"engine": engine, "cluster": cluster})
        self.engines = EnginePool(replaces=True)
        self.evaluators = EnginePool(replaces=True) if config.evaluate.engines else None
        self.models = {name: EnginePool(replaces=True) for name in config.environment.models}
        """Models besides the policy, by name; their weights never change."""
        self._trainer = _TrainerReplica(self)
        self.engine_names: list[str] = []  # engines of the rollouts, serving or restarting
        self._numbers = itertools.count(config.engine.num_local + config.engine.remote)

    @property
    def trainer(self) -> TrainerGroup:
        return self._trainer.trainer

    async def start(self, *others: Coroutine[Any, Any, object]) -> None:
        """Start all workers concurrently, and run `others` beside them."""
        num_local, num_remote = self._config.engine.num_local, self._config.engine.remote
        add, policy = self.worker_pool.add, self.worker_pool.policy
        joining = replace(policy, delay_restarts=False, remedy=OPEN_TO_HOSTS)
        async with asyncio.TaskGroup() as starting:
            for i in range(num_local + num_remote):
                name, is_remote = f"engine-{i}", i >= num_local
                self.engine_names.append(name)
                start = self._start_remote if is_remote else self._start_local
                engine = self._replica(name, self.engines, start)
                starting.create_task(add(engine, policy=joining if is_remote else None))
            for i in range(self._config.evaluate.engines):
                assert self.evaluators is not None
                engine = self._replica(f"evaluator-{i}", self.evaluators, self._start_local)
                starting.create_task(add(engine))
            for model, settings in self._config.environment.models.items():
                start = partial(self._start_model, model)
                for i in range(settings.engine.num_local):
                    name, pool = f"model-{model}-{i}", self.models[model]
                    engine = self._replica(name, pool, start, fixed=settings.engine)
                    starting.create_task(add(engine))
            starting.create_task(add(self._trainer))
            for other in others:
                starting.create_task(other)

    async def add_engine(self) -> str:
        """Start one more engine on this host; returns its name."""
        name = f"engine-{next(self._numbers)}"
        engine = self._replica(name, self.engines, self._start_local, joins_late=True)
        await self.worker_pool.add(engine)
        self.engine_names.append(name)
        return name

    async def remove_engine(self, name: str) -> None:
        """Let an engine finish its sequences, then stop it for good."""
        names = self.engine_names
        if name not in names:
            raise ConfigError(
                f"The run has no engine {name!r}; its engines are {', '.join(names)}."
            )
        if len(names) == 1:
            raise ConfigError(f"{name!r} is the last engine of the run; add another first.")
        names.remove(name)
        await self.worker_pool.remove(name)

    def _replica(
        self,
        name: str,
        pool: EnginePool,
        start: Start,
        *,
        joins_late: bool = False,
        fixed: EngineConfig | None = None,
    ) -> EngineReplica:
        """`fixed`: settings of an engine whose weights never change; None for the policy."""
        return EngineReplica(
            name,
            pool=pool,
            start=partial(start, name),
            load_newest=self._load_newest if fixed is None else None,
            hang_timeout_s=self._config.supervision.hang_timeout_s,
            start_timeout_s=self._config.cluster.start_timeout_s,
            joins_late=joins_late,
            capabilities=load_backend(fixed or self._config.engine).capabilities,
        )

    async def _start_local(self, name: str, is_late: bool) -> Worker:
        role, _, number = name.rpartition("-")
        index = int(number) + (self._config.engine.num_local if role == "evaluator" else 0)
        device = self._config.placement.engine(index)
        start = self._start_engine(self._config.placed_on(device), is_late=is_late)
        return await self._launch(name, start, module="millrace.inference.worker")

    async def _start_remote(self, name: str, is_late: bool) -> Worker:
        """Wait for an engine from another host: for a late one without limit."""
        self.on_phase(name, "waiting for another host to join")
        timeout_s = None if is_late else self._config.cluster.join_timeout_s
        worker = await self.hub.await_joined(name, timeout_s=timeout_s)
        device = self._config.placement.engine(int(name.rpartition("-")[2]))
        start = self._start_engine(self._remote_config.placed_on(device), is_late=is_late)
        try:
            return await self._load(worker, start)
        except ConfigError as error:
            raise ConfigError(f"On {worker.host}, for {name}: {error}") from error

    async def _start_model(self, model: str, name: str, _is_late: bool) -> Worker:
        settings = self._config.environment.models[model]
        own = {
            "model": settings.model,
            "engine": settings.engine,
            "lora": None,
            "weights": WeightsConfig(),  # its weights never change
        }
        device = self._config.placement.model(model, int(name.rpartition("-")[2]))
        config = self._config.model_copy(update=own).placed_on(device)
        start = StartEngine(
            config=config.model_dump(mode="json"), model_path=_absolute(settings.path), version=0
        )
        try:
            return await self._launch(name, start, module="millrace.inference.worker")
        except ConfigError as error:
            raise ConfigError(f"For environment.models.{model}: {error}") from error

    def _start_engine(self, config: RunConfig, *, is_late: bool) -> StartEngine:
        # A late engine gets the newest weights before it serves. The checkpoint that the run
        # resumed from may be gone by then; the model never is.
        prepared = self.prepared
        adapter = None if is_late else prepared.adapter_path
        return StartEngine(
            config=config.model_dump(mode="json"),
            model_path=_absolute(config.model.path if is_late else prepared.model_path),
            version=0 if is_late else prepared.cursor.version,
            adapter_path=None if adapter is None else _absolute(adapter),
            records_routes=config.trainer.replay_routes,
        )

    async def _launch(self, name: str, start: Message, *, module: str) -> Worker:
        self.on_phase(name, "starting the process")
        return await self._load(await self.hub.launch(name, module, env=self.gpu_env), start)

    async def _load(self, worker: Worker, start: Message) -> Worker:
        self.on_phase(worker.name, "loading")
        await worker.start_as(start, timeout_s=self._config.cluster.start_timeout_s)
        self.on_phase(worker.name, None)
        return worker

    async def _load_newest(self, engine: Engine) -> None:
        while True:
            update = await self.trainer.borrow()
            try:
                await engine.swap(update)
                return
            except WeightError:
                if not await self.trainer.is_lost(update):
                    raise
            finally:
                await self.trainer.release(update)


class _TrainerReplica(GroupReplica):
    """The ranks of the trainer, restarted together from the newest checkpoint."""

    def __init__(self, workers: RunWorkers) -> None:
        prepared, config = workers.prepared, workers.prepared.config
        ranks = config.trainer.num_ranks
        super().__init__(
            "trainer",
            members=["trainer"] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)],
            hang_timeout_s=config.supervision.hang_timeout_s,
            first_hang_timeout_s=config.cluster.start_timeout_s,
        )
        self._config = config
        self._run_dir = Path(config.run_dir)
        # A run that may go without a step for longer has steps that take longer.
        self._step_timeout_s = max(MIN_STEP_TIMEOUT_S, config.supervision.stall_timeout_s)
        self._run_workers = workers
        self._checkpoint = prepared.checkpoint
        self._version = prepared.cursor.version  # of the weights that the ranks have loaded
        self._trainer: TrainerGroup | None = None

    @property
    def trainer(self) -> TrainerGroup:
        assert self._trainer is not None, "the trainer is started first"
        return self._trainer

    async def launch(self, name: str) -> Worker:
        self._run_workers.on_phase(name, "starting the process")
        env = below_normal(self._run_workers.gpu_env)
        return await self._run_workers.hub.launch(name, "millrace.training.worker", env=env)

    async def attach(self, workers: Sequence[Worker], *, is_restart: bool) -> None:
        checkpoint = self._checkpoint
        if is_restart:
            found = await asyncio.to_thread(newest_checkpoint, self._run_dir)
            checkpoint = found.directory or self._checkpoint
            self._version = 0 if checkpoint is None else int(read_run_state(checkpoint)["version"])
        await self._load(workers, checkpoint)
        if is_restart:
            update = await self.trainer.replace(workers, version=self._version)
            self._run_workers.on_restored(update)
            return
        self._trainer = TrainerGroup(
            workers,
            sizes=self._config.trainer.mesh_sizes,
            past=StepsInMemory(version=self._version),
            step_timeout_s=self._step_timeout_s,
            save_timeout_s=SAVE_TIMEOUT_S,
        )

    def detach(self) -> None:
        self.trainer.lose()

    async def _load(self, workers: Sequence[Worker], checkpoint: Path | None) -> None:
        """Let all ranks load at once; they find each other at a port that is free now."""
        start = StartTrainer(
            config=self._config.model_dump(mode="json"),
            checkpoint=None if checkpoint is None else str(checkpoint),
            rendezvous="" if len(workers) == 1 else f"tcp://127.0.0.1:{_free_port()}",
        )

        async def load(rank: int, worker: Worker) -> None:
            self._run_workers.on_phase(worker.name, "loading")
            message = msgspec.structs.replace(start, rank=rank)
            await worker.call(message, timeout_s=self._config.cluster.start_timeout_s)
            self._run_workers.on_phase(worker.name, None)

        await asyncio.gather(*(load(rank, worker) for rank, worker in enumerate(workers)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _absolute(model: str) -> str:
    """A path that holds in any working directory; a name on the hub stays as it is."""
    return str(Path(model).absolute()) if Path(model).exists() else model
