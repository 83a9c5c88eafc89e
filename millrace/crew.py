"""The engines and the trainer of one run: who starts them, and who starts them again.

Promise: an engine that dies is replaced, and the new one serves no request before it has the newest
weights. A trainer that dies is replaced by one that loads the last checkpoint and does the steps
since then again, from the same batches. Whoever asks them for something need not know of it.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Progress, StartEngine, StartTrainer
from millrace.cluster.mps import behind
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import Engine
from millrace.core.weight_update import WeightUpdate
from millrace.engines.pool import EnginePool
from millrace.engines.remote import RemoteEngine
from millrace.prepare import Prepared
from millrace.supervision.deaths import RestartLimits
from millrace.supervision.keeper import Keeper
from millrace.supervision.pulse import Pulse
from millrace.training.checkpoints import newest_checkpoint, read_run_state
from millrace.training.past_steps import StepsInMemory
from millrace.training.remote import RemoteTrainer


class Crew:
    def __init__(
        self,
        prepared: Prepared,
        *,
        hub: Hub,
        remote_threads: int | None,
        gpu_env: Mapping[str, str],
        run_dir: Path,
        on_restart: Callable[[str, str], None],
        on_restored: Callable[[WeightUpdate], None],
    ) -> None:
        """`remote_threads` of an engine as the user set them: this machine's cores are not
        another's. `gpu_env`: of engines and the trainer only; a scorer may be killed at any time,
        and MPS lets such a death disturb everyone who computes on that GPU. `on_restored` is told
        the newest version, which it releases, by a trainer that has replaced another."""
        self._prepared = prepared
        self._config = prepared.config
        self._hub = hub
        self._gpu_env = gpu_env
        self._run_dir = run_dir
        self._on_restart = on_restart
        self._on_restored = on_restored
        adapters = {n: _from_any_folder(path) for n, path in self._config.engine.adapters.items()}
        remote = {"threads": remote_threads, "adapters": adapters}
        self._remote_config = self._config.model_copy(
            update={"engine": self._config.engine.model_copy(update=remote)}
        )
        self.engines = EnginePool(replaces=True)
        self.evaluators = EnginePool(replaces=True) if self._config.evaluate.engines else None
        self._trainer: RemoteTrainer | None = None
        self._keepers: dict[str, Keeper] = {}  # by worker

    @property
    def trainer(self) -> RemoteTrainer:
        assert self._trainer is not None, "it was started"
        return self._trainer

    async def start(self, *others: Awaitable[object]) -> None:
        """Bring up all workers side by side, and whoever else shall come up meanwhile."""
        engine = self._config.engine
        here, there = self._start_engine, self._start_remote_engine
        async with asyncio.TaskGroup() as starting:
            for i in range(engine.count + engine.remote):
                start = here if i < engine.count else there
                starting.create_task(self._enlist(f"engine-{i}", start, pool=self.engines))
            if self.evaluators is not None:
                for i in range(self._config.evaluate.engines):
                    starting.create_task(self._enlist(f"evaluator-{i}", here, pool=self.evaluators))
            starting.create_task(self._enlist_trainer())
            for other in others:
                starting.create_task(_awaited(other))

    async def run(self) -> None:
        """Keep all workers. Ends only by cancellation, or raises GivenUp."""
        async with asyncio.TaskGroup() as keeping:
            for keeper in self._keepers.values():
                keeping.create_task(keeper.run())

    def heard(self, worker: str, progress: Progress) -> None:
        """A worker tells what it does; some of them are kept by others."""
        if worker in self._keepers:
            self._keepers[worker].heard(progress)

    async def _enlist(
        self, name: str, start: Callable[[str], Awaitable[Worker]], *, pool: EnginePool
    ) -> None:
        """Start an engine, and see to it that the pool has one of this name from now on."""
        place = _Place(
            name,
            start=start,
            pool=pool,
            bring_weights=self._bring_newest,
            swap_timeout_s=self._config.supervision.swap_timeout_s,
        )
        worker = await place.open()
        self._keep(worker, replace=place.replace, on_death=place.on_death)

    async def _enlist_trainer(self) -> None:
        worker = await self._start_trainer(self._prepared.checkpoint)
        past = StepsInMemory(version=self._prepared.cursor.version)
        trainer = self._trainer = RemoteTrainer(
            worker,
            past=past,
            step_timeout_s=self._config.supervision.step_timeout_s,
            save_timeout_s=self._config.supervision.save_timeout_s,
        )
        self._keep(worker, replace=self._replace_trainer, on_death=trainer.lose)

    async def _replace_trainer(self) -> Worker:
        found = await asyncio.to_thread(newest_checkpoint, self._run_dir)
        checkpoint = found.directory or self._prepared.checkpoint
        version = 0 if checkpoint is None else int(read_run_state(checkpoint)["version"])
        worker = await self._start_trainer(checkpoint)
        try:
            self._on_restored(await self.trainer.replace(worker, version=version))
        except BaseException:
            worker.kill()
            raise
        return worker

    def _keep(
        self,
        worker: Worker,
        *,
        replace: Callable[[], Awaitable[Worker]],
        on_death: Callable[[], None],
    ) -> None:
        settings = self._config.supervision
        limits = RestartLimits(
            max_restarts=settings.max_restarts,
            window_s=settings.window_s,
            backoff_s=settings.backoff_s,
        )
        self._keepers[worker.name] = Keeper(
            worker,
            replace=replace,
            on_death=on_death,
            limits=limits,
            make_pulse=self._make_pulse,
            on_restart=self._on_restart,
        )

    def _make_pulse(self) -> Pulse:
        return Pulse(
            timeout_s=self._config.supervision.hang_timeout_s,
            first_timeout_s=self._config.cluster.start_timeout_s,
        )

    async def _bring_newest(self, engine: Engine) -> None:
        while True:
            async with self.trainer.lent() as update:
                try:
                    await engine.swap(update)
                    return
                except WeightError:
                    if not await self.trainer.is_lost(update):
                        raise

    async def _start_engine(self, name: str) -> Worker:
        worker = await self._hub.launch(name, "millrace.workers.engine", env=self._gpu_env)
        await self._load_model(worker, config=self._config)
        return worker

    async def _start_remote_engine(self, name: str) -> Worker:
        worker = await self._hub.expect(name, timeout_s=self._config.cluster.join_timeout_s)
        try:
            await self._load_model(worker, config=self._remote_config)
        except ConfigError as error:
            raise ConfigError(f"On {worker.host}, for {name}: {error}") from error
        return worker

    async def _load_model(self, engine: Worker, *, config: RunConfig) -> None:
        adapter = self._prepared.adapter_path
        start = StartEngine(
            config=config.model_dump(mode="json"),
            model_path=_from_any_folder(self._prepared.model_path),
            version=self._prepared.cursor.version,
            adapter_path=None if adapter is None else _from_any_folder(adapter),
        )
        try:
            await engine.call(start, timeout_s=self._config.cluster.start_timeout_s)
        except BaseException:
            engine.kill()
            raise

    async def _start_trainer(self, checkpoint: Path | None) -> Worker:
        worker = await self._hub.launch(
            "trainer", "millrace.workers.trainer", env=behind(self._gpu_env)
        )
        start = StartTrainer(
            config=self._config.model_dump(mode="json"),
            checkpoint=None if checkpoint is None else str(checkpoint),
        )
        try:
            await worker.call(start, timeout_s=self._config.cluster.start_timeout_s)
        except BaseException:
            worker.kill()
            raise
        return worker


class _Place:
    """One engine's place in a pool, whoever holds it."""

    def __init__(
        self,
        name: str,
        *,
        start: Callable[[str], Awaitable[Worker]],
        pool: EnginePool,
        bring_weights: Callable[[Engine], Awaitable[None]],
        swap_timeout_s: float,
    ) -> None:
        self._name = name
        self._start = start
        self._pool = pool
        self._bring_weights = bring_weights
        self._swap_timeout_s = swap_timeout_s
        self._engine: RemoteEngine | None = None

    async def open(self) -> Worker:
        """The first one holds the weights that the run begins with."""
        return await self._fill(prepare=_is_ready)

    async def replace(self) -> Worker:
        return await self._fill(prepare=self._bring_weights)

    def on_death(self) -> None:
        assert self._engine is not None
        self._pool.lose(self._engine)

    async def _fill(self, *, prepare: Callable[[Engine], Awaitable[None]]) -> Worker:
        worker = await self._start(self._name)
        engine = RemoteEngine(worker, swap_timeout_s=self._swap_timeout_s)
        try:
            await self._pool.join(engine, prepare=prepare)
        except BaseException:
            worker.kill()
            raise
        self._engine = engine
        return worker


async def _is_ready(engine: Engine) -> None:
    """It needs nothing."""


async def _awaited(work: Awaitable[object]) -> None:
    await work


def _from_any_folder(model: str) -> str:
    """What also another host, with a working directory of its own, understands."""
    return str(Path(model).absolute()) if Path(model).exists() else model
