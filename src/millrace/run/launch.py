"""Starts the processes of the engines and the trainer of one run.

Promise: a worker that is returned has loaded its model; one that could not load it has ended.
Runs on the controller's event loop.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message, StartEngine, StartTrainer
from millrace.cluster.mps import below_normal
from millrace.cluster.worker import Worker
from millrace.config import RunConfig, WeightsConfig
from millrace.core.errors import ConfigError
from millrace.run.prepare import PreparedRun

# Imported once, by the fork server. Workers of other kinds start from the same imports.
PRELOAD = (
    "torch",
    "transformers",
    "millrace.inference.worker",
    "millrace.training.worker",
    "millrace.scoring.functions.worker",
    "millrace.scoring.reward_models.worker",
    "millrace.scoring.teachers.worker",
)


class Launcher:
    def __init__(
        self,
        prepared: PreparedRun,
        *,
        hub: Hub,
        remote_threads: int | None,
        gpu_env: Mapping[str, str],
        on_phase: Callable[[str, str | None], None],
    ) -> None:
        """`remote_threads`: engine.threads as the user set it; another host may have other cores.

        `gpu_env`: environment of engines and the trainer. Scorers do not get it: they may be killed
        at any time, and with MPS such a death disturbs every process on that GPU.
        """
        self._prepared = prepared
        self._hub = hub
        self._gpu_env = gpu_env
        self._on_phase = on_phase  # called with a worker's start-up phase; None when it is ready
        self._timeout_s = prepared.config.cluster.start_timeout_s
        engine = prepared.config.engine
        adapters = {name: _absolute(path) for name, path in engine.adapters.items()}
        remote = engine.model_copy(update={"threads": remote_threads, "adapters": adapters})
        self._remote_config = prepared.config.model_copy(update={"engine": remote})

    async def start_engine(self, name: str, *, is_late: bool = False) -> Worker:
        """`is_late`: the engine gets the newest weights before it serves."""
        worker = await self._launch(name, "millrace.inference.worker", env=self._gpu_env)
        config = self._prepared.config
        role, _, index = name.rpartition("-")
        place = config.placement.evaluator if role == "evaluator" else config.placement.engine
        config = config.placed_on(place(int(index)))
        await self._load(worker, self._start_message(config, is_late=is_late))
        return worker

    async def start_model(self, name: str, *, model: str) -> Worker:
        """Start an engine of one of environment.models."""
        config = self._prepared.config
        settings = config.environment.models[model]
        device = config.placement.model(model, int(name.rpartition("-")[2]))
        own = {
            "model": settings.model,
            "engine": settings.engine,
            "lora": None,
            "weights": WeightsConfig(),  # its weights never change
        }
        worker = await self._launch(name, "millrace.inference.worker", env=self._gpu_env)
        start = StartEngine(
            config=config.model_copy(update=own).placed_on(device).model_dump(mode="json"),
            model_path=_absolute(settings.path),
            version=0,
        )
        try:
            await self._load(worker, start)
        except ConfigError as error:
            raise ConfigError(f"For environment.models.{model}: {error}") from error
        return worker

    async def await_engine(
        self, name: str, *, timeout_s: float | None, is_late: bool = False
    ) -> Worker:
        """Wait for an engine from another host; None waits without limit."""
        self._on_phase(name, "waiting for another host to join")
        worker = await self._hub.await_joined(name, timeout_s=timeout_s)
        try:
            device = self._remote_config.placement.engine(int(name.rpartition("-")[2]))
            config = self._remote_config.placed_on(device)
            await self._load(worker, self._start_message(config, is_late=is_late))
        except ConfigError as error:
            raise ConfigError(f"On {worker.host}, for {name}: {error}") from error
        return worker

    async def start_trainer(self, checkpoint: Path | None) -> Worker:
        worker = await self._launch(
            "trainer", "millrace.training.worker", env=below_normal(self._gpu_env)
        )
        start = StartTrainer(
            config=self._prepared.config.model_dump(mode="json"),
            checkpoint=None if checkpoint is None else str(checkpoint),
        )
        await self._load(worker, start)
        return worker

    def _start_message(self, config: RunConfig, *, is_late: bool) -> StartEngine:
        # The checkpoint that the run resumed from may be gone by then; the model never is.
        adapter = None if is_late else self._prepared.adapter_path
        path = config.model.path if is_late else self._prepared.model_path
        return StartEngine(
            config=config.model_dump(mode="json"),
            model_path=_absolute(path),
            version=0 if is_late else self._prepared.cursor.version,
            adapter_path=None if adapter is None else _absolute(adapter),
            records_routes=config.trainer.replay_routes,
        )

    async def _launch(self, name: str, module: str, *, env: Mapping[str, str]) -> Worker:
        self._on_phase(name, "starting the process")
        return await self._hub.launch(name, module, env=env)

    async def _load(self, worker: Worker, start: Message) -> None:
        self._on_phase(worker.name, "loading")
        try:
            await worker.call(start, timeout_s=self._timeout_s)
            self._on_phase(worker.name, None)
        except ConfigError:
            await worker.stop()  # the process is healthy; its settings are wrong
            raise
        except BaseException:
            worker.kill()
            raise


def _absolute(model: str) -> str:
    """A path that holds in any working directory; a name on the hub stays as it is."""
    return str(Path(model).absolute()) if Path(model).exists() else model
