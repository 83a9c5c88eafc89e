"""`millrace serve`: engines in processes of their own, and an HTTP server in front of them.

Promise: no process outlives the command. A request whose engine dies resumes on another engine, or
on the restarted one, from its last streamed token. A request that finds no engine waits for a
limited time. An engine that dies too often ends the server with its error.
"""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message, StartEngine, WorkerProgress
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.core.errors import first_cause, printable, run_all
from millrace.environments.tools.calls import format_of
from millrace.inference.backend import load_backend, of_engine, server_secrets
from millrace.inference.pool import EnginePool
from millrace.inference.remote import EngineReplica
from millrace.scoring.teachers.process import LogprobModelSettings, TeacherProcess
from millrace.serving.api.openapi import Health
from millrace.serving.api.score import ScorePool
from millrace.serving.clients import TokenQuotas
from millrace.serving.metrics import ServerMetrics
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app
from millrace.serving.settings import ServeSettings
from millrace.serving.tinker.routes import TrainingRuntime

SCORE_TIMEOUT_S = 300.0  # per /score request
SWITCH_S = 0.001  # that a thread which reads a request may keep the event loop waiting


def serve(settings: ServeSettings) -> None:
    sys.setswitchinterval(SWITCH_S)
    run_on_own_loop(lambda: _serve(settings))


async def _serve(settings: ServeSettings) -> None:
    metrics = ServerMetrics()

    def on_event(worker: str, message: Message) -> None:
        if isinstance(message, WorkerProgress):
            metrics.engines[worker] = message.counters

    def on_restart(name: str, reason: str) -> None:
        metrics.restarts += name.startswith("engine-")
        print(f"millrace: {printable(reason)}", file=sys.stderr, flush=True)

    config = settings.config
    policy = RestartPolicy(max_restarts=config.supervision.max_restarts)
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    async with (
        Hub(log_dir=settings.log_dir, on_event=on_event, preload=PRELOAD) as hub,
        WorkerPool(hub.launch, policy=policy, on_restart=on_restart) as worker_pool,
    ):
        pool = EnginePool(replaces=True, max_wait_s=settings.limits.wait_s)
        training = await TrainingRuntime.start(settings)
        replicas = [
            _engine_replica(i, config, pool, hub, metrics, training)
            for i in range(settings.engines)
        ]
        reading = asyncio.to_thread(_read_model, config)
        ready: list[Any] = await run_all([reading, *map(worker_pool.add, replicas)])
        tokenizer, max_context = ready[0]
        served = ServedModel(
            pool if settings.engines else None,
            tokenizer=tokenizer,
            name=settings.name,
            adapters=tuple(config.engine.adapters),
            max_context=max_context,
            max_sequences=max(1, settings.engines) * config.engine.max_sequences,
            separates_clients=len(settings.keys) > 1,
            tool_format=format_of("auto", template=str(tokenizer.chat_template or "")),
            metrics=metrics,
            quotas=TokenQuotas(settings.training.max_tokens if settings.training else None),
        )
        async with _score_pool(
            worker_pool, settings, tokenizer=tokenizer, max_context=max_context
        ) as score_pool:
            app = make_app(
                served,
                keys=settings.keys,
                hosts=settings.hosts,
                limits=settings.limits,
                health=lambda: Health.of(serving=pool.num_engines, engines=settings.engines),
                score_pool=score_pool,
            )
            if training is not None:
                training.add_to(app, served, settings)
            gc.freeze()  # else a full collection looks at all modules, and the event loop waits
            with contextlib.closing(served), first_cause():
                async with http_listener(
                    app, host=settings.host, port=settings.port, limits=settings.limits
                ) as url:
                    print(f"Serving {printable(settings.name)} at {url}/v1", flush=True)
                    await worker_pool.run()


def _engine_replica(
    index: int,
    config: RunConfig,
    pool: EnginePool,
    hub: Hub,
    metrics: ServerMetrics,
    training: TrainingRuntime | None,
) -> EngineReplica:
    name, timeout_s = f"engine-{index}", config.cluster.start_timeout_s
    engine = of_engine(config.engine if training is None else training.engine, index)
    placed = config.placed_on(*config.placement.engine_devices(index, tp=engine.tp))
    placed = placed.model_copy(update={"engine": engine}).model_dump(mode="json")

    async def start(_is_late: bool) -> Worker:
        env = server_secrets(engine)
        worker = await hub.launch(name, "millrace.inference.worker", env=env)
        message = StartEngine(config=placed, model_path=config.model.path, version=0)
        await worker.start_as(message, timeout_s=timeout_s)
        if training is not None:
            await training.slots.attach(name, worker)
        return worker

    return EngineReplica(
        name,
        pool=pool,
        launcher=start,
        load_newest=None,
        hang_timeout_s=config.supervision.hang_timeout_s,
        first_hang_timeout_s=timeout_s,
        capabilities=load_backend(config.engine).capabilities,
        on_lost=lambda: metrics.engines.pop(name, None),
    )


@contextlib.asynccontextmanager
async def _score_pool(
    worker_pool: WorkerPool, settings: ServeSettings, *, tokenizer: Any, max_context: int
) -> AsyncIterator[ScorePool | None]:
    """Run the processes that answer /score, if there are any. Lost ones are restarted."""
    if settings.scorers == 0:
        yield None
        return
    from millrace.models.directory import vocabulary_checksum

    config, num_tokens = settings.config, max(tokenizer.get_vocab().values()) + 1
    reader = LogprobModelSettings(dtype=config.engine.dtype, threads=config.cluster.threads or 1)
    device, model = config.placement.engine(0), config.model.path
    start = reader.start_message(config, device=device, model=model, num_known=num_tokens)
    timeout_s = config.cluster.start_timeout_s
    processes = [
        TeacherProcess(
            f"scorer-{i}", start=start, worker_pool=worker_pool, start_timeout_s=timeout_s
        )
        for i in range(settings.scorers)
    ]
    try:
        await run_all(process.start() for process in processes)
        yield ScorePool(
            processes=processes,
            vocabulary=vocabulary_checksum(tokenizer),
            num_tokens=num_tokens,
            max_context=max_context,
            timeout_s=SCORE_TIMEOUT_S,
        )
    finally:
        await asyncio.gather(*(process.close() for process in processes))


def _read_model(config: RunConfig) -> tuple[Any, int]:
    """Return tokenizer and context length. Runs in a thread while the engines load."""
    from millrace.models import directory  # slow import

    model = config.model
    trust: Any = {"trust_remote_code": model.trust_remote_code}
    tokenizer = directory.load_tokenizer(model.path, **trust)
    wanted: Any = {"wanted": config.engine.max_context, "setting": "--engine.max_context"}
    context = directory.context_length(model.path, **wanted, **trust)
    for note in directory.context_notes(model.path, **wanted, **trust):
        print(note, file=sys.stderr, flush=True)
    return tokenizer, context
