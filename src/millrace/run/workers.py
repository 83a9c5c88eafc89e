"""The engines and the trainer of one run: their start, their replacements, and their number.

Promise: a worker that serves has loaded its model; one that could not load it has ended. An engine
that dies is restarted with the newest weights. A trainer of which a rank dies is restarted from the
last checkpoint and repeats the steps since then with the same batches; calls to it wait meanwhile.
Engines can be added and removed while the run lasts. Runs on the controller's event loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from millrace.cluster.hub import Hub
from millrace.cluster.launchers.hosts import JoinLauncher
from millrace.cluster.launchers.launcher import Launcher, Resources
from millrace.cluster.messages import Message, StartEngine
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import EngineConfig, RunConfig, WeightsConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import Engine
from millrace.core.records import DEFAULT_POLICY, WeightUpdate
from millrace.inference.backend import load_backend, of_engine, server_secrets
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EngineReplica
from millrace.run.cluster import absolute, portable
from millrace.run.execution.trainer_replica import TrainerReplica
from millrace.run.placement import engine_index
from millrace.run.prepare import PreparedRun
from millrace.training.group import TrainerGroup
from millrace.weights.broadcaster import VersionBroadcaster

ENGINE_MODULE = "millrace.inference.worker"
OPEN_TO_HOSTS = "Its host starts another; if that has left, run `millrace join` on any host."

Start = Callable[[str, bool], Awaitable[Worker]]  # name, whether it joins or restarts late


@dataclass(kw_only=True, eq=False)
class RunWorkers:
    prepared: PreparedRun
    hub: Hub
    launcher: Launcher  # of ranks and engines, as far as they do not join
    worker_pool: WorkerPool
    # Environment of engines and the trainer. Scorers do not get it: they may be killed at any time,
    # and with MPS such a death disturbs every process on that GPU.
    gpu_env: Mapping[str, str]
    on_phase: Callable[[str, str | None], None]  # worker, start-up phase; None when it is ready
    broadcasters: Mapping[str | None, VersionBroadcaster]  # by policy; None = the first
    trains: bool = True  # False: there is no trainer, and the engines keep their weights

    def __post_init__(self) -> None:
        config = self._config = self.prepared.config
        # Hosts differ in cores, so what the user set counts there.
        threads = {"threads": self.prepared.given.cluster.threads}
        self._remote_config = portable(config).updated(cluster=threads)
        self.engines = EnginePool(replaces=True)
        self.evaluators = EnginePool(replaces=True) if config.evaluate.engines else None
        self.models = {name: EnginePool(replaces=True) for name in config.environment.models}
        """Models besides the policy, by name; their weights never change, except for policies."""
        self._trainers = {
            policy: TrainerReplica(self, policy=policy)
            for policy in self.broadcasters
            if policy not in config.further_adapters
        }
        self.engine_names: list[str] = []  # engines of the rollouts, serving or restarting
        self._numbers = itertools.count(config.engine.num_local + config.engine.remote)

    @property
    def trainer(self) -> TrainerGroup:
        """The trainer of the first policy."""
        return self._trainers[None].trainer

    @property
    def other_trainers(self) -> dict[str, TrainerGroup]:
        return {
            name: self._trainers.get(name, self._trainers[None]).trainer
            for name in self.prepared.policies
        }

    def published(self, worker: str, update: WeightUpdate) -> None:
        """A trainer has published a version of its policy."""
        for policy, replica in self._trainers.items():
            if worker in replica.members:
                replica.trainer.published(update)
                name = policy if update.policy == DEFAULT_POLICY else update.policy
                self.broadcasters[name].publish(update)

    async def start(self, *others: Coroutine[Any, Any, object]) -> None:
        """Start all workers concurrently, and run `others` beside them."""
        num_local, num_remote = self._config.engine.num_local, self._config.engine.remote
        add, policy = self.worker_pool.add, self.worker_pool.policy
        joining = replace(policy, remedy=OPEN_TO_HOSTS)
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
                    policy = model if model in self.prepared.policies else None
                    fixed = None if policy else settings.engine
                    engine = self._replica(name, pool, start, fixed=fixed, policy=policy)
                    starting.create_task(add(engine))
            is_joined = self._config.trainer.remote > 0
            for trainer in self._trainers.values() if self.trains else ():
                starting.create_task(add(trainer, policy=joining if is_joined else None))
            for other in others:
                starting.create_task(other)
        if self.trains and self._config.probes_weights:
            await self._probe_first_versions()

    async def _probe_first_versions(self) -> None:
        """Let engines compare the weights that they have loaded themselves with the trainer's; an
        engine that dies meanwhile does so when it is replaced."""
        for policy, replica in self._trainers.items():
            engines = self.engines if policy is None else self.models[policy]
            await self._load_policy(replica.trainer, DEFAULT_POLICY, engines)
            if policy is None and self.evaluators is not None:
                await self._load_policy(replica.trainer, DEFAULT_POLICY, self.evaluators)

    async def add_engine(self) -> str:
        name = f"engine-{next(self._numbers)}"
        device, gpus = self._config.placement.engines[0], self._config.engine.tp
        await self.launcher.reserve({name: self.resources(device, gpus=gpus)})
        engine = self._replica(name, self.engines, self._start_local, joins_late=True)
        try:
            await self.worker_pool.add(engine)
        except BaseException:
            await self.launcher.release(name)
            raise
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
        await self.launcher.release(name)

    async def reserve(self) -> None:
        """Hold what all workers need before the first one starts."""
        config, placement = self._config, self._config.placement
        trainers = self._trainers.values() if self.trains else ()
        ranks = {
            name: self.resources(placement.rank(rank))
            for trainer in trainers
            for rank, name in enumerate(trainer.members_here)
        }
        if ranks:  # an evaluation has none
            await self.launcher.reserve(ranks)
        num_engines = config.engine.num_local
        names = [f"engine-{i}" for i in range(num_engines)]
        names += [f"evaluator-{i}" for i in range(config.evaluate.engines)]
        tp = config.engine.tp
        places = {name: (placement.engine(i * tp), tp) for i, name in enumerate(names)}
        for model, settings in config.environment.models.items():
            for i in range(settings.engine.num_local):
                places[f"model-{model}-{i}"] = placement.model(model, i), settings.engine.tp
        for name, (device, gpus) in places.items():
            await self.launcher.reserve({name: self.resources(device, gpus=gpus)})
        for i in range(config.environment.workers, config.environment.num_workers):
            await self.launcher.reserve({f"environment-{i}": Resources()})

    def resources(self, device: str, *, gpus: int = 1) -> Resources:
        if device == "auto":
            device = self.prepared.devices[0].name
        gpus = 0 if device == "cpu" else gpus
        return Resources(cpus=self._config.cluster.threads or 1, gpus=gpus)

    def _replica(
        self,
        name: str,
        pool: EnginePool,
        start: Start,
        *,
        joins_late: bool = False,
        fixed: EngineConfig | None = None,
        policy: str | None = None,
    ) -> EngineReplica:
        """`fixed`: settings of an engine whose weights never change; None for that of a `policy`,
        where None = the first."""
        names = (DEFAULT_POLICY, *(self._config.further_adapters if policy is None else ()))
        load_newest = partial(self._load_newest, self._trainers[policy], names)
        return EngineReplica(
            name,
            pool=pool,
            launcher=partial(start, name),
            load_newest=load_newest if fixed is None and self.trains else None,
            hang_timeout_s=self._config.supervision.hang_timeout_s,
            first_hang_timeout_s=self._config.cluster.start_timeout_s,
            joins_late=joins_late,
            is_lent=self._is_lent(name),
            capabilities=load_backend(fixed or self._config.engine).capabilities,
        )

    def _is_lent(self, name: str) -> bool:
        """Whether an engine may compute on a device of the trainer."""
        config, placement, tp = self._config, self._config.placement, self._config.engine.tp
        if self.prepared.policies and not config.adapter_policies:  # any of their trainers
            return True
        if name.rpartition("-")[0] not in ("engine", "evaluator"):
            return False
        if (index := engine_index(config, name)) is None:
            return config.trainer.remote > 0  # only its host knows its devices
        ranks = range(config.trainer.num_ranks - config.trainer.remote)
        own = {*placement.engine_devices(index, tp=tp)}
        return not own.isdisjoint(placement.rank(rank) for rank in ranks)

    async def _start_local(self, name: str, is_late: bool) -> Worker:
        role, index = name.rpartition("-")[0], engine_index(self._config, name)
        assert index is not None
        engine = of_engine(self._config.engine, index)
        devices = self._config.placement.engine_devices(index, tp=engine.tp)
        config = self._config.updated(engine=engine).placed_on(*devices)
        start = self._start_engine(config, is_late=is_late, role=role)
        return await self._launch(name, start, engine)

    async def _start_remote(self, name: str, is_late: bool) -> Worker:
        """Wait for an engine from another host: for a late one without limit."""
        timeout_s = None if is_late else self._config.cluster.join_timeout_s
        # Only its kind: which GPUs a host has, and which of them are free, that host knows.
        device = self._config.placement.engine(0).partition(":")[0]
        gpus = 0 if device == "cpu" else self._config.engine.tp
        needs = Resources(gpus=gpus, or_cpu=device == "auto")
        worker = await self.join(name, role="engine", timeout_s=timeout_s, needs=needs)
        start = self._start_engine(self._remote_config.placed_on(device), is_late=is_late)
        try:
            return await self._load(worker, start)
        except ConfigError as error:
            raise ConfigError(f"On {worker.host}, for {name}: {error}") from error

    async def _start_model(self, model: str, name: str, is_late: bool) -> Worker:
        settings, index = self._config.environment.models[model], int(name.rpartition("-")[2])
        if (policy := self.prepared.policies.get(model)) is not None:
            own = policy.config.placed_on(self._config.placement.model(model, index))
            path = own.model.path if is_late else policy.checkpoint or own.model.path
            start = StartEngine(
                config=own.model_dump(mode="json"),
                model_path=absolute(str(path)),
                version=0 if is_late else self.prepared.versions[model],
                records_routes=own.trainer.replay_routes,
            )
            return await self._launch(name, start, own.engine)
        devices = self._config.placement.model_devices(model, index, tp=settings.engine.tp)
        config = self._config.placed_on(*devices).updated(
            model=settings.model,
            engine=of_engine(settings.engine, index),
            lora=None,
            weights=WeightsConfig(),  # its weights never change
        )
        start = StartEngine(
            config=config.model_dump(mode="json"), model_path=absolute(settings.path), version=0
        )
        try:
            return await self._launch(name, start, settings.engine)
        except ConfigError as error:
            raise ConfigError(f"For environment.models.{model}: {error}") from error

    def _start_engine(
        self, config: RunConfig, *, is_late: bool, role: str = "engine"
    ) -> StartEngine:
        # A late engine gets the newest weights before it serves. The checkpoint that the run
        # resumed from may be gone by then; the model never is.
        prepared, is_late = self.prepared, is_late and self.trains
        adapter = None if is_late else prepared.adapter_path
        return StartEngine(
            config=config.model_dump(mode="json"),
            model_path=absolute(config.model.path if is_late else prepared.model_path),
            version=0 if is_late else prepared.version,
            adapter_path=None if adapter is None else absolute(adapter),
            policies=self._adapters(is_late=is_late),
            records_routes=config.trainer.replay_routes,
            role=role,
        )

    def _adapters(self, *, is_late: bool) -> dict[str, tuple[str | None, int]]:
        """Adapters besides the first policy's, as far as an engine needs them when it starts."""
        if is_late:  # their folders may be gone, too
            return dict.fromkeys(self._config.further_adapters, (None, 0))
        return {
            name: (None if path is None else absolute(str(path)), version)
            for name, (path, version) in self.prepared.adapters.items()
        }

    async def _launch(self, name: str, start: Message, engine: EngineConfig) -> Worker:
        env = {**self.gpu_env, **server_secrets(engine)}
        return await self._load(await self.launch(name, ENGINE_MODULE, env=env), start)

    async def launch(self, name: str, module: str, *, env: Mapping[str, str]) -> Worker:
        """Start a process that has resources reserved."""
        self.on_phase(name, "starting the process")
        return await self.hub.launch(name, module, env=env, launcher=self.launcher)

    async def join(
        self, name: str, *, role: str, timeout_s: float | None, needs: Resources
    ) -> Worker:
        """Wait for a host that brings this worker and has memory for it."""
        self.on_phase(name, "waiting for another host to join")
        (device_bytes,) = {p.min_bytes for p in self.prepared.processes if p.name == name}
        needs = replace(needs, device_bytes=device_bytes)
        waiting = JoinLauncher(self.hub.registry, role=role, timeout_s=timeout_s, needs=needs)
        return await self.hub.launch(name, "", launcher=waiting)

    def loading(self, worker: Worker) -> None:
        """Report that a worker loads its model, and where, if its host has chosen that."""
        devices = ", ".join(f"{device.name} ({device.kind})" for device in worker.devices)
        where = f" on {devices} of {worker.host}" if devices else ""
        self.on_phase(worker.name, f"loading{where}")

    async def _load(self, worker: Worker, start: Message) -> Worker:
        self.loading(worker)
        await worker.start_as(start, timeout_s=self._config.cluster.start_timeout_s)
        self.on_phase(worker.name, None)
        return worker

    async def _load_newest(
        self, replica: TrainerReplica, policies: Sequence[str], engine: Engine
    ) -> None:
        for policy in policies:
            await self._load_policy(replica.trainer, policy, engine)

    async def _load_policy(self, trainer: TrainerGroup, policy: str, engine: Engine) -> None:
        while True:
            update = await trainer.borrow(policy)
            try:
                await engine.swap(update)
                return
            except WeightError:
                if not await trainer.is_lost(update):
                    raise
            finally:
                await trainer.release(update)
