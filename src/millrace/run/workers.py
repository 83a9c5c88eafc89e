"""The engines and the trainer of one run, and who starts them again.

Promise: an engine that dies is replaced. A trainer that dies is replaced by one that loads the last
checkpoint and does the steps since then again, from the same batches. Whoever asks them for
something need not know of it. Engines may come and go while the run goes on.

Runs on the controller's event loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from millrace.cluster.messages import WorkerProgress
from millrace.cluster.supervision.supervisor import Keepers, Start
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import Engine
from millrace.core.weight_update import WeightUpdate
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EnginePlace
from millrace.run.launch import Launcher
from millrace.training.checkpoints.directory import newest_checkpoint, read_run_state
from millrace.training.group import TrainerGroup
from millrace.training.past_steps import StepsInMemory

OPEN_AGAIN = "Its place is open to another host: run `millrace join` there."


class RunWorkers:
    def __init__(
        self,
        config: RunConfig,
        *,
        launcher: Launcher,
        checkpoint: Path | None,
        version: int,
        on_restart: Callable[[str, str], None],
        on_restored: Callable[[WeightUpdate], None],
    ) -> None:
        """`checkpoint` that the run goes on from, of `version`. `on_restored` is told the newest
        version, which it releases, by a trainer that has replaced another."""
        self._config = config
        self._launcher = launcher
        self._checkpoint = checkpoint
        self._version = version
        self._on_restored = on_restored
        self.engines = EnginePool(replaces=True)
        self.evaluators = EnginePool(replaces=True) if config.evaluate.engines else None
        self.models = {name: EnginePool(replaces=True) for name in config.environment.models}
        """Of the models besides the policy, by name; their weights never change."""
        self._trainer: TrainerGroup | None = None
        self._keepers = Keepers(
            config.supervision,
            start_timeout_s=config.cluster.start_timeout_s,
            on_restart=on_restart,
        )
        self._places: dict[str, EnginePlace] = {}  # of the engines of the rollouts, by name
        self._numbers = itertools.count(config.engine.count + config.engine.remote)

    @property
    def trainer(self) -> TrainerGroup:
        assert self._trainer is not None, "it was started"
        return self._trainer

    @property
    def engine_names(self) -> list[str]:
        """Of the rollouts, whether they are up or being started again."""
        return list(self._places)

    async def start(self, *others: Awaitable[object]) -> None:
        """Bring up all workers side by side, and whoever else shall come up meanwhile."""
        num_here, num_remote = self._config.engine.count, self._config.engine.remote
        async with asyncio.TaskGroup() as starting:
            for i in range(num_here):
                starting.create_task(self._enlist(f"engine-{i}"))
            for i in range(num_here, num_here + num_remote):
                starting.create_task(self._enlist_remote(f"engine-{i}"))
            for i in range(self._config.evaluate.engines):
                starting.create_task(self._enlist_evaluator(f"evaluator-{i}"))
            for model, settings in self._config.environment.models.items():
                for i in range(settings.count):
                    starting.create_task(self._enlist_model(f"model-{model}-{i}", model))
            starting.create_task(self._enlist_trainer())
            for other in others:
                starting.create_task(_awaited(other))

    async def run(self) -> None:
        """Keep all workers. Ends only by cancellation, or raises GivenUp."""
        await self._keepers.run()

    def heard(self, worker: str, progress: WorkerProgress) -> None:
        """A worker tells what it does; some of them are kept by others."""
        self._keepers.heard(worker, progress)

    async def add_engine(self) -> str:
        """One more on this host, for as long as the run lasts; returns its name."""
        name = f"engine-{next(self._numbers)}"
        place = self._place(self.engines, name)
        worker = await place.fill()
        self._places[name] = place
        self._keepers.keep(worker, replace=place.fill, on_death=place.clear)
        return name

    async def remove_engine(self, name: str) -> None:
        """Let it finish its sequences, and do without it from then on."""
        if name not in self._places:
            raise ConfigError(f"The run has no engine {name!r}, but {', '.join(self._places)}.")
        if len(self._places) == 1:
            raise ConfigError(f"{name!r} is the run's last engine; add another first.")
        place = self._places.pop(name)
        self._keepers.drop(name)
        await place.give_up()

    async def _enlist(self, name: str) -> None:
        """Start an engine, and see to it that there is one of this name from now on."""
        place = self._places[name] = self._place(self.engines, name)
        worker = await self._keepers.first(name, partial(self._launcher.start_engine, name))
        await place.take(worker)
        self._keepers.keep(worker, replace=place.fill, on_death=place.clear)

    async def _enlist_remote(self, name: str) -> None:
        expect = partial(self._launcher.expect_engine, name)
        late = partial(expect, timeout_s=None, is_late=True)
        place = self._place(self.engines, name, start=late)
        self._places[name] = place
        worker = await expect(timeout_s=self._config.cluster.join_timeout_s)
        await place.take(worker)
        self._keepers.keep(worker, replace=place.fill, on_death=place.clear, remedy=OPEN_AGAIN)

    async def _enlist_evaluator(self, name: str) -> None:
        assert self.evaluators is not None
        place = self._place(self.evaluators, name)
        worker = await self._keepers.first(name, partial(self._launcher.start_engine, name))
        await place.take(worker)
        self._keepers.keep(worker, replace=place.fill, on_death=place.clear)

    async def _enlist_model(self, name: str, model: str) -> None:
        start = partial(self._launcher.start_model, name, model=model)
        place = EnginePlace(
            self.models[model],
            start=start,
            bring_newest=None,
            swap_timeout_s=self._config.supervision.swap_timeout_s,
        )
        worker = await self._keepers.first(name, start)
        await place.take(worker)
        self._keepers.keep(worker, replace=place.fill, on_death=place.clear)

    def _place(self, pool: EnginePool, name: str, *, start: Start | None = None) -> EnginePlace:
        """`start` of those who come late; by default on this host."""
        return EnginePlace(
            pool,
            start=start or partial(self._launcher.start_engine, name, is_late=True),
            bring_newest=self._bring_newest,
            swap_timeout_s=self._config.supervision.swap_timeout_s,
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

    async def _enlist_trainer(self) -> None:
        start = partial(self._launcher.start_trainer, self._checkpoint)
        worker = await self._keepers.first("trainer", start)
        settings = self._config.supervision
        self._trainer = TrainerGroup(
            [worker],
            past=StepsInMemory(version=self._version),
            step_timeout_s=settings.step_timeout_s,
            save_timeout_s=settings.save_timeout_s,
        )
        self._keepers.keep(worker, replace=self._replace_trainer, on_death=self._trainer.lose)

    async def _replace_trainer(self) -> Worker:
        found = await asyncio.to_thread(newest_checkpoint, Path(self._config.run_dir))
        checkpoint = found.directory or self._checkpoint
        version = 0 if checkpoint is None else int(read_run_state(checkpoint)["version"])
        worker = await self._launcher.start_trainer(checkpoint)
        try:
            self._on_restored(await self.trainer.replace([worker], version=version))
        except BaseException:
            worker.kill()
            raise
        return worker


async def _awaited(work: Awaitable[object]) -> None:
    await work
