"""One run from settings to checkpoint: check everything, start the workers, run the controller.

Promise: errors that can be found without a worker are raised before any worker starts. No process
and no shared memory outlives the call.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import PRELOAD, shared_fork_server
from millrace.cluster.hub import Hub
from millrace.cluster.join.ticket import ticket_file
from millrace.cluster.messages import Message, Published, WorkerProgress
from millrace.cluster.mps import shared_gpu
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import RunConfig, load_config
from millrace.controller.controller import Controller
from millrace.controller.evaluation import Evaluation
from millrace.core import files as storage
from millrace.core.errors import RunFailed, first_cause
from millrace.core.files import private_files, private_folder
from millrace.core.protocols import Environment
from millrace.core.records import Sampling
from millrace.environments.rollouts.player import Player
from millrace.journal import Journal, NoJournal
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.progress import ProgressDisplay, make_progress
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.run.build import RunParts, build_controller
from millrace.run.checks import local_devices
from millrace.run.environment import open_environment
from millrace.run.placement import placement_lines
from millrace.run.prepare import PreparedRun, prepare
from millrace.run.scaling import scaling_server
from millrace.run.workers import RunWorkers
from millrace.scoring.functions.workers import MODULE as SCORER_MODULE
from millrace.scoring.pool import ScorerPool, build_scorer_pool
from millrace.tasks.lengths import LengthPredictor
from millrace.weights.broadcaster import VersionBroadcaster

ScorerLike = Callable[..., Any] | str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    run_dir: Path
    checkpoint: Path  # a Hugging Face model directory, or with [lora] a PEFT one
    steps: int
    episodes: int  # trained on, in this call
    seconds: float
    before: Evaluation | None = None  # every held-out episode, before the first step
    after: Evaluation | None = None  # every held-out episode, after the last step

    @property
    def accuracy_before(self) -> float | None:
        return self.before.accuracy if self.before else None

    @property
    def accuracy_after(self) -> float | None:
        return self.after.accuracy if self.after else None


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | None = None,
    *,
    tasks: Sequence[Any] | None = None,
    eval_tasks: Sequence[Any] | None = None,
    scorers: Sequence[ScorerLike] | ScorerLike | None = None,
    environment: Callable[..., Any] | Mapping[str, Any] | None = None,
    resume: bool = False,
    **settings: Any,
) -> RunResult:
    """Train a model; returns when the last step is done and its checkpoint written.

    Settings come from a TOML file or a dict; keyword arguments (`model="...", trainer={"steps":
    10}`) override them. Tasks, reward functions and the environment may be Python objects. Settings
    of an environment function are given beside it: `environment={"function": play, "max_turns":
    8}`. `scorers` are added to those of the file: reward functions, names ("exact",
    "rewards.py:digits") or tables ({"type": "numeric", "tolerance": 0.01}).
    """
    play, table = _split_environment(environment)
    functions, tables = _split_scorers(scorers)
    settled = load_config(config, overrides={**settings, **table})
    if tables:
        settled = load_config(settled, overrides={"scorers": [*settled.scorers, *tables]})
    progress = make_progress(settled.monitoring.progress)
    progress.starting("run", "reading the model's settings and the tasks")
    try:
        with (
            private_files(),
            shared_fork_server(),
        ):  # it imports torch while this process prepares the run
            prepared = prepare(
                settled,
                tasks=tasks,
                eval_tasks=eval_tasks,
                scorers=functions,
                environment=play,
                resume=resume,
            )
            return _train(prepared, resume=resume, progress=progress)
    finally:
        progress.stop()


def describe_placement(config: RunConfig, *, resume: bool = False) -> str:
    """What a run would start where, and what it needs there; nothing is started."""
    prepared = prepare(config, resume=resume)
    scorers = f"{config.scoring.workers} scorer processes" if prepared.scorers else "no scorer"
    return "\n".join(
        [
            *placement_lines(prepared.processes, prepared.devices),
            f"Beside them on the CPU: the controller, {scorers}. Nothing was started.",
        ]
    )


def _train(prepared: PreparedRun, *, resume: bool, progress: ProgressDisplay) -> RunResult:
    run_dir = RunDir(prepared.config.run_dir)
    run_dir.open(prepared.portable_config, resume=resume)
    try:
        return run_on_own_loop(
            lambda: _Run(prepared=prepared, run_dir=run_dir, resume=resume, progress=progress).run()
        )
    except OSError as error:
        if not storage.is_full(error):
            raise
        raise RunFailed(
            f"run_dir = '{run_dir.path}' is out of space ({storage.reason(error)}); free some, and"
            " resume with --resume."
        ) from error
    finally:
        run_dir.close()


def _split_scorers(
    given: Sequence[ScorerLike] | ScorerLike | None,
) -> tuple[list[Callable[..., Any]], list[str | Mapping[str, Any]]]:
    """Reward functions, and scorers that settings describe."""
    if given is None or callable(given) or isinstance(given, str | Mapping):
        given = [] if given is None else [given]
    functions = [scorer for scorer in given if callable(scorer)]
    return functions, [scorer for scorer in given if not callable(scorer)]


def _split_environment(
    given: Callable[..., Any] | Mapping[str, Any] | None,
) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """The environment function, if one was given, and the settings of the section."""
    if given is None or callable(given):
        return given, {}
    table = dict(given)
    play = table.pop("function") if callable(table.get("function")) else None
    return play, {"environment": table}


@dataclass(kw_only=True, eq=False)
class _Run:
    """The processes of one run and their messages. Lives on the controller's event loop."""

    prepared: PreparedRun
    run_dir: RunDir
    resume: bool
    progress: ProgressDisplay

    def __post_init__(self) -> None:
        cursor = self.prepared.cursor
        self._config = self.prepared.config
        self._monitor = RunMonitor(
            self._config,
            run_dir=self.run_dir,
            resume_from=cursor.version if self.resume else None,
            trackers=self.prepared.trackers,
            progress=self.progress,
        )
        self._broadcaster = VersionBroadcaster(version=cursor.version, policy=cursor.policy)
        self._workers: RunWorkers | None = None

    async def run(self) -> RunResult:
        start_s = time.monotonic()
        prepared, config = self.prepared, self._config
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._monitor.close)
            gpu_env = await stack.enter_async_context(self._shared_gpu())
            private = stack.enter_context(private_folder())
            hub = await stack.enter_async_context(
                Hub(
                    log_dir=self.run_dir.logs,
                    on_event=self._on_event,
                    address=config.cluster.address,
                    advertise=config.cluster.advertise,
                    start_timeout_s=config.cluster.start_timeout_s,
                    preload=PRELOAD,
                )
            )
            # Left before the hub stops the workers, or their end would count as deaths.
            worker_pool = await stack.enter_async_context(
                WorkerPool(
                    partial(self._launch_scorer, hub),
                    policy=RestartPolicy(max_restarts=config.supervision.max_restarts),
                    on_restart=self._monitor.restarted,
                )
            )
            scorers = self._build_scorers(worker_pool, private=private)
            stack.push_async_callback(scorers.close)
            environment = await stack.enter_async_context(
                open_environment(
                    config,
                    prepared.environment,
                    renderer=prepared.renderer,
                    recipe=prepared.recipe,
                    models=prepared.models,
                )
            )
            journal = self._open_journal()
            stack.push_async_callback(journal.close)
            with first_cause(), self._ticket(hub):
                workers = self._workers = RunWorkers(
                    prepared=prepared,
                    hub=hub,
                    worker_pool=worker_pool,
                    gpu_env=gpu_env,
                    on_phase=self._monitor.starting,
                    on_restored=self._broadcaster.publish,
                )
                self._monitor.starting("run", "starting the workers")
                await workers.start(scorers.start())
                self._monitor.starting("run", None)
                controller = self._build_controller(
                    workers, scorers=scorers, environment=environment, journal=journal
                )
                gauges = await self._supervise(workers, controller, worker_pool, private=private)
        return self._conclude(controller, gauges, seconds=time.monotonic() - start_s)

    def _shared_gpu(self) -> contextlib.AbstractAsyncContextManager[dict[str, str]]:
        return shared_gpu(
            self._config.cluster.share_gpu,
            num_cuda_workers=max(
                Counter(d for d in local_devices(self._config) if d != "cpu").values(), default=0
            ),
            log=self.run_dir.logs / "mps.log",
            warn=self._monitor.warn,
        )

    async def _launch_scorer(self, hub: Hub, name: str, module: str) -> Worker:
        self._monitor.starting(name, "starting the process")
        # Reward functions may call services; models of the run do not.
        return await hub.launch(name, module, has_secrets=module == SCORER_MODULE)

    async def _supervise(
        self, workers: RunWorkers, controller: Controller, worker_pool: WorkerPool, *, private: Path
    ) -> RunGauges:
        """Run the controller while workers are restarted and engines can be added or removed."""
        async with asyncio.TaskGroup() as activities:
            supervision = activities.create_task(worker_pool.run())
            async with scaling_server(
                workers, pointer=self.run_dir.control, private=private, warn=self._monitor.warn
            ):
                gauges = await controller.run()
            supervision.cancel()
        return gauges

    @contextlib.contextmanager
    def _ticket(self, hub: Hub) -> Iterator[None]:
        """Offer a ticket to hosts that bring engines, for as long as the run lasts."""
        remote, path = self._config.engine.remote, self._config.cluster.ticket
        if remote == 0:
            yield
            return
        assert path is not None, "checked with the config"
        with ticket_file(hub.ticket(), Path(path)):
            engines = "1 engine" if remote == 1 else f"{remote} engines"
            print(
                f"Waiting for {engines} from other hosts; copy the ticket there, it is a secret,"
                f" and run: millrace join {path} [--count N]",
                flush=True,
            )
            yield

    def _build_scorers(self, worker_pool: WorkerPool, *, private: Path) -> ScorerPool:
        return build_scorer_pool(
            self.prepared.scorers,
            advantages=self.prepared.advantages,
            shaping=self.prepared.shaping,
            num_workers=self._config.scoring.workers,
            worker_pool=worker_pool,
            private=private,
            folder=self.run_dir.scorers,
            start_timeout_s=self._config.cluster.start_timeout_s,
            warn=self._monitor.warn,
            may_be_empty=self.prepared.environment is not None,
            run=self.prepared.run_info,
        )

    def _open_journal(self) -> Journal | NoJournal:
        for sentence in self.prepared.warnings:
            self._monitor.warn(sentence)
        if self.prepared.history is None:
            return NoJournal()
        return Journal(
            self.run_dir.journal,
            history=self.prepared.history,
            task_of=self.prepared.tasks.redrawn,
            settings=self._config.journal,
        )

    def _build_controller(
        self,
        workers: RunWorkers,
        *,
        scorers: ScorerPool,
        environment: Environment,
        journal: Journal | NoJournal,
    ) -> Controller:
        config, prepared = self._config, self.prepared
        player = Player(
            environment=environment,
            engine=workers.engines,
            renderer=prepared.renderer,
            sampling=Sampling(**config.sampling.model_dump()),
            max_context=prepared.max_context,
            seed=config.seed,
            lengths=LengthPredictor(most=config.rollout.longest_first),
            others=workers.models,
            wants_routes=config.trainer.replay_routes,
        )
        return build_controller(
            RunParts(
                config=config,
                tasks=prepared.tasks,
                held_out=prepared.held_out,
                player=player,
                scorers=scorers,
                engines=workers.engines,
                evaluators=workers.evaluators,
                trainer=workers.trainer,
                broadcaster=self._broadcaster,
                monitor=self._monitor,
                run_dir=self.run_dir,
                journal=journal,
                cursor=prepared.cursor,
            )
        )

    def _on_event(self, worker: str, message: Message) -> None:
        """A worker has sent a message that answers no call."""
        if isinstance(message, WorkerProgress):
            self._monitor.on_progress(worker, spans=message.spans, counters=message.counters)
        elif isinstance(message, Published):
            assert self._workers is not None, "the trainer publishes only after a step"
            self._workers.trainer.published(message.update)
            self._broadcaster.publish(message.update)

    def _conclude(self, controller: Controller, gauges: RunGauges, *, seconds: float) -> RunResult:
        before, after = controller.eval_scheduler.before, controller.eval_scheduler.after
        checkpoint = controller.checkpoints.writer.newest
        assert checkpoint is not None, "the last step is saved"
        result = RunResult(
            run_dir=self.run_dir.path,
            checkpoint=checkpoint,
            steps=controller.state.version,
            episodes=self._monitor.episodes,
            seconds=seconds,
            before=before,
            after=after,
        )
        self.run_dir.write_summary(
            {
                "accuracy_before": result.accuracy_before,
                "accuracy_after": result.accuracy_after,
                "evaluation_before": before.metrics() if before else None,
                "evaluation_after": after.metrics() if after else None,
                "seconds": seconds,
                **self._monitor.run_rates(),
                "episodes": result.episodes,
                "steps": result.steps,
                "checkpoint": str(result.checkpoint),
                "run_dir": str(result.run_dir),
                "restarts": dict(self._monitor.restarts),
                "sequences_resumed": gauges.sequences_resumed,
                "resumed_tokens": gauges.resumed_tokens,
            }
        )
        return result
