"""How the processes of engines and the trainer of one run are started.

Promise: a worker that is returned has loaded its model; one that could not is gone.
Runs on the controller's event loop.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message, StartEngine, StartTrainer
from millrace.cluster.mps import behind
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.config.sections import WeightsConfig
from millrace.core.errors import ConfigError
from millrace.run.prepare import PreparedRun


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
        """`remote_threads` of an engine as the user set them: this machine's cores are not
        another's. `gpu_env`: of engines and the trainer only; a scorer may be killed at any time,
        and MPS lets such a death disturb everyone who computes on that GPU."""
        self._prepared = prepared
        self._hub = hub
        self._gpu_env = gpu_env
        self._on_phase = on_phase  # called with a worker's start-up phase; None when it is ready
        self._timeout_s = prepared.config.cluster.start_timeout_s
        engine = prepared.config.engine
        adapters = {name: _from_any_folder(path) for name, path in engine.adapters.items()}
        remote = engine.model_copy(update={"threads": remote_threads, "adapters": adapters})
        self._remote_config = prepared.config.model_copy(update={"engine": remote})

    async def start_engine(self, name: str, *, is_late: bool = False) -> Worker:
        """`is_late`: the newest weights will be brought to it before it serves."""
        worker = await self._launch(name, "millrace.inference.worker", env=self._gpu_env)
        await self._load(worker, self._model(self._prepared.config, is_late=is_late))
        return worker

    async def start_model(self, name: str, *, model: str) -> Worker:
        """An engine of one of environment.models."""
        config = self._prepared.config
        settings = config.environment.models[model]
        own = {
            "model": settings.model,
            "engine": settings.engine,
            "lora": None,
            "weights": WeightsConfig(),  # those of the run never come to it
        }
        worker = await self._launch(name, "millrace.inference.worker", env=self._gpu_env)
        start = StartEngine(
            config=config.model_copy(update=own).model_dump(mode="json"),
            model_path=_from_any_folder(settings.path),
            version=0,
        )
        try:
            await self._load(worker, start)
        except ConfigError as error:
            raise ConfigError(f"For environment.models.{model}: {error}") from error
        return worker

    async def expect_engine(
        self, name: str, *, timeout_s: float | None, is_late: bool = False
    ) -> Worker:
        """One that another host brings."""
        self._on_phase(name, "waiting for another host to join")
        worker = await self._hub.expect(name, timeout_s=timeout_s)
        try:
            await self._load(worker, self._model(self._remote_config, is_late=is_late))
        except ConfigError as error:
            raise ConfigError(f"On {worker.host}, for {name}: {error}") from error
        return worker

    async def start_trainer(self, checkpoint: Path | None) -> Worker:
        worker = await self._launch(
            "trainer", "millrace.training.worker", env=behind(self._gpu_env)
        )
        start = StartTrainer(
            config=self._prepared.config.model_dump(mode="json"),
            checkpoint=None if checkpoint is None else str(checkpoint),
        )
        await self._load(worker, start)
        return worker

    def _model(self, config: RunConfig, *, is_late: bool) -> StartEngine:
        # The checkpoint that the run went on from may be gone by then; its model never is.
        adapter = None if is_late else self._prepared.adapter_path
        path = config.model.path if is_late else self._prepared.model_path
        return StartEngine(
            config=config.model_dump(mode="json"),
            model_path=_from_any_folder(path),
            version=0 if is_late else self._prepared.cursor.version,
            adapter_path=None if adapter is None else _from_any_folder(adapter),
            notes_routes=config.trainer.replay_routes,
        )

    async def _launch(self, name: str, module: str, *, env: Mapping[str, str]) -> Worker:
        self._on_phase(name, "starting the process")
        return await self._hub.launch(name, module, env=env)

    async def _load(self, worker: Worker, start: Message) -> None:
        self._on_phase(worker.name, "loading the model")
        try:
            await worker.call(start, timeout_s=self._timeout_s)
            self._on_phase(worker.name, None)
        except ConfigError:
            await worker.stop()  # it is well, and has said what is wrong
            raise
        except BaseException:
            worker.kill()
            raise


def _from_any_folder(model: str) -> str:
    """What also another host, with a working directory of its own, understands."""
    return str(Path(model).absolute()) if Path(model).exists() else model
