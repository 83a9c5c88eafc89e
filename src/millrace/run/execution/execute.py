"""One run in this process: start the workers, run the controller, and shut everything down.

Promise: no process and no shared memory outlives the call. An exception of a callback or of a stage
is raised after the shutdown, as it is.
"""

import asyncio
import contextlib
import importlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import shared_fork_server
from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message, Published, WorkerProgress
from millrace.cluster.mps import apart, shared_gpu
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.controller.checkpointing import Checkpointing
from millrace.controller.controller import Controller
from millrace.controller.evaluation import Evaluation
from millrace.controller.policies import OtherPolicy
from millrace.controller.preemption import SIGTERM, Preemption
from millrace.core import files as storage
from millrace.core.errors import Preempted, RunFailed, first_cause
from millrace.core.records import DEFAULT_POLICY, Sampling
from millrace.environments.rollouts.player import Environment, Player
from millrace.journal import Journal, NoJournal
from millrace.monitoring.callbacks import CallbackList
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.progress import ProgressDisplay, make_progress
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.run.build import RunParts, build_controller
from millrace.run.cluster import offered_ticket, open_hub
from millrace.run.environment import WORKER_MODULE, open_environment
from millrace.run.episodes.external import external_server
from millrace.run.placement import local_devices
from millrace.run.policies import remove_later_checkpoints
from millrace.run.prepare import PreparedRun, prepare
from millrace.run.scaling import autoscale, scaling_server
from millrace.run.workers import RunWorkers
from millrace.scoring.functions.workers import MODULE as SCORER_MODULE
from millrace.scoring.pool import ScorerPool, build_scorer_pool
from millrace.tasks.streams import LengthPredictor
from millrace.weights.broadcaster import VersionBroadcaster


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    run_dir: Path
    checkpoint: Path  # a Hugging Face model directory, or with [lora] a PEFT one
    steps: int
    episodes: int  # trained in this call
    seconds: float
    before: Evaluation | None = None  # every held-out episode, before the first step
    after: Evaluation | None = None  # every held-out episode, after the last step
    stopped: str | None = None  # why the run ended before its last step; it can resume

    @property
    def accuracy_before(self) -> float | None:
        return self.before.accuracy if self.before else None

    @property
    def accuracy_after(self) -> float | None:
        return self.after.accuracy if self.after else None

    @property
    def history(self) -> dict[str, list[Any]]:
        """The columns of metrics.jsonl by name; None where a step has no value."""
        rows = read_metrics(RunDir(self.run_dir).metrics)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def to_pandas(self) -> Any:
        """The history as a pandas.DataFrame, by step; needs pandas."""
        return importlib.import_module("pandas").DataFrame(self.history).set_index("step")


def execute(
    config: RunConfig,
    *,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    preemption: Preemption | None = None,
    kind: "type[RunProcesses] | None" = None,
    **objects: Any,
) -> Any:
    """Train, on an event loop of this thread; returns what the `kind` of run returns.
    `preemption` is how another thread stops the run; `objects` are arguments of prepare()."""
    kind = kind or RunProcesses
    progress = make_progress(config.monitoring.progress)
    progress.starting("run", "reading the model's settings and the tasks")
    with contextlib.ExitStack() as stack:
        stack.callback(progress.stop)
        stack.enter_context(storage.private_files())
        # The server imports torch while this process prepares the run.
        stack.enter_context(shared_fork_server())
        prepared = kind.prepare(config, resume=resume, **objects)
        for sentence in prepared.notes:
            progress.note(sentence)
        run_dir = RunDir(prepared.config.run_dir)
        run_dir.open(prepared.portable_config, resume=resume)
        stack.callback(run_dir.close)
        parts = {"prepared": prepared, "run_dir": run_dir, "resume": resume, "progress": progress}
        parts |= {"callbacks": callbacks, "preemption": preemption or Preemption()}
        try:
            return run_on_own_loop(lambda: kind(**parts).run())
        except OSError as error:
            if not storage.is_full(error):
                raise
            raise RunFailed(
                f"run_dir = '{run_dir.path}' is out of space ({storage.reason(error)}); free some,"
                " and resume with --resume."
            ) from error


class StartedRun(NamedTuple):
    """What has been started when the work of a run begins."""

    workers: RunWorkers
    player: Player
    scorers: ScorerPool
    journal: Journal | NoJournal
    private: Path  # a folder that only this user can read


@dataclass(kw_only=True, eq=False)
class RunProcesses:
    """The processes of one run and their messages. Lives on the controller's event loop."""

    prepare: ClassVar[Callable[..., PreparedRun]] = staticmethod(prepare)
    trains: ClassVar = True  # False: there is no trainer
    curve: ClassVar = "reward/mean"  # metric that the progress shows
    prepared: PreparedRun
    run_dir: RunDir
    resume: bool
    progress: ProgressDisplay
    callbacks: Sequence[Any]
    preemption: Preemption

    def __post_init__(self) -> None:
        cursor = self.prepared.cursor
        self._config = self.prepared.config
        self._callbacks = CallbackList(self.callbacks, stop=self.preemption.finish_step)
        self._monitor = RunMonitor(
            self._config,
            run_dir=self.run_dir,
            resume_from=cursor.version if self.resume else None,
            progress=self.progress,
            decode=self.prepared.renderer.decode,
            callbacks=self._callbacks,
            curve=self.curve,
        )
        self._broadcaster = VersionBroadcaster(version=self.prepared.version, policy=cursor.policy)
        self._broadcasters = {
            name: VersionBroadcaster(version=version, policy=self._name_of(name))
            for name, version in self.prepared.sent_versions.items()
        }
        remove_later_checkpoints(self._config, version=cursor.version)
        self._workers: RunWorkers | None = None
        self._controller: Controller | None = None
        self._writer: Checkpointing | None = None
        self._start_s = time.monotonic()
        self.preemption.grace_s = self._config.checkpoint.grace_s
        self.preemption.warn = self._monitor.warn

    async def run(self) -> Any:
        with self._callbacks.ending():
            try:
                gauges = await self._run()
            except Preempted:
                reason = self.preemption.reason
                if reason == SIGTERM or self._writer is None or not self._writer.newest:
                    raise
                return self._result(stopped=reason)
            return self._conclude(gauges)

    async def _run(self) -> RunGauges:
        prepared, config = self.prepared, self._config
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.preemption)
            stack.callback(self._monitor.close)
            stack.push_async_callback(self._monitor.recorder.written)
            self._callbacks.call("on_start", config)
            gpu_env = await stack.enter_async_context(self._shared_gpu())
            private = stack.enter_context(storage.private_folder())
            if not config.cluster.is_local:
                self._monitor.starting("run", "reaching the cluster")
            hub, launcher = await stack.enter_async_context(
                open_hub(config, log_dir=self.run_dir.logs, on_event=self._on_event)
            )
            # Left before the hub stops the workers, or their end would count as deaths.
            worker_pool = await stack.enter_async_context(
                WorkerPool(
                    partial(self._launch_scorer, hub, apart(gpu_env, private=private)),
                    policy=RestartPolicy(max_restarts=config.supervision.max_restarts),
                    on_restart=self._monitor.restarted,
                )
            )
            scorers = self._build_scorers(worker_pool, private=private)
            stack.push_async_callback(scorers.close)
            opened = open_environment(
                prepared,
                worker_pool=worker_pool,
                hub=hub,
                launcher=launcher,
                private=private / "environment",
                newest=lambda: self._broadcaster.newest,
            )
            environment, env_workers = await stack.enter_async_context(opened)
            journal = self._open_journal()
            stack.push_async_callback(journal.close)
            with first_cause(), offered_ticket(config, hub):
                workers = self._workers = RunWorkers(
                    prepared=prepared,
                    hub=hub,
                    launcher=launcher,
                    worker_pool=worker_pool,
                    gpu_env=gpu_env,
                    on_phase=self._monitor.starting,
                    broadcasters={None: self._broadcaster, **self._broadcasters},
                    trains=self.trains,
                )
                self._monitor.starting("run", "starting the workers")
                await workers.reserve()
                await workers.start(scorers.start(), env_workers.start())
                self._monitor.starting("run", None)
                player = self._build_player(workers, environment)
                async with external_server(environment, prepared=prepared, engines=workers.engines):
                    return await self._work(StartedRun(workers, player, scorers, journal, private))

    def _shared_gpu(self) -> contextlib.AbstractAsyncContextManager[dict[str, str]]:
        num_by_gpu = Counter(d for d in local_devices(self._config) if d != "cpu")
        return shared_gpu(
            self._config.cluster.share_gpu,
            num_cuda_workers=max(num_by_gpu.values(), default=0),
            log=self.run_dir.logs / "mps.log",
            warn=self._monitor.warn,
        )

    async def _launch_scorer(
        self, hub: Hub, env: Mapping[str, str], name: str, module: str
    ) -> Worker:
        self._monitor.starting(name, "starting the process")
        # Reward functions and environments may call services; models of the run do not.
        has_secrets = module in (SCORER_MODULE, WORKER_MODULE)
        return await hub.launch(name, module, env=env, has_secrets=has_secrets)

    async def _work(self, started: StartedRun) -> RunGauges:
        """Run the controller while workers are restarted and engines can be added or removed."""
        workers, private = started.workers, started.private
        parts = RunParts(
            config=self._config,
            tasks=self.prepared.tasks,
            held_out=self.prepared.held_out,
            player=started.player,
            scorers=started.scorers,
            engines=workers.engines,
            evaluators=workers.evaluators,
            trainer=workers.trainer,
            broadcaster=self._broadcaster,
            others=self._other_policies(workers),
            lagged=[self._broadcasters[name] for name in self._config.lagged],
            monitor=self._monitor,
            run_dir=self.run_dir,
            journal=started.journal,
            cursor=self.prepared.cursor,
            versions=self.prepared.versions,
            preemption=self.preemption,
        )
        controller = self._controller = build_controller(parts)
        self._writer = controller.checkpoints.writer
        async with asyncio.TaskGroup() as activities:
            supervision = activities.create_task(workers.worker_pool.run())
            async with scaling_server(workers, pointer=self.run_dir.control, private=private):
                scaling = activities.create_task(
                    autoscale(workers, controller, report=self._monitor.warn)
                )
                gauges = await controller.run()
            supervision.cancel()
            scaling.cancel()
        return gauges

    def _name_of(self, policy: str) -> str:
        """The name that its trainer knows a policy by."""
        return policy if policy in self._config.further_adapters else DEFAULT_POLICY

    def _other_policies(self, workers: RunWorkers) -> list[OtherPolicy]:
        return [
            OtherPolicy(
                name=name,
                policy=self._name_of(name),
                trainer=trainer,
                broadcaster=self._broadcasters[name],
                engines=(engines := workers.models.get(name, workers.engines)),
                versions=self._broadcasters[name].subscribe(engines.swap),
                checkpoints=RunDir(self.prepared.policies[name].config.run_dir).checkpoints,
            )
            for name, trainer in workers.other_trainers.items()
        ]

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

    def _build_player(self, workers: RunWorkers, environment: Environment) -> Player:
        config, prepared = self._config, self.prepared
        return Player(
            environment=environment,
            engine=workers.engines,
            renderer=prepared.renderer,
            sampling=Sampling(**config.sampling.model_dump()),
            max_context=prepared.max_context,
            seed=config.seed,
            lengths=LengthPredictor(max_skips=config.rollout.longest_first),
            others=workers.models,
            wants_routes=config.trainer.replay_routes and self.trains,
        )

    def _on_event(self, worker: str, message: Message) -> None:
        """A worker has sent a message that answers no call."""
        if isinstance(message, WorkerProgress):
            self._monitor.on_progress(worker, spans=message.spans, counters=message.counters)
        elif isinstance(message, Published):
            assert self._workers is not None, "the trainer publishes only after a step"
            self._workers.published(worker, message.update)

    @property
    def _evaluations(self) -> dict[str, Evaluation | None]:
        assert self._controller is not None, "it has run"
        scheduler = self._controller.eval_scheduler
        return {"before": scheduler.before, "after": scheduler.after}

    def _result(self, *, stopped: str | None = None) -> RunResult:
        checkpoint = self._writer and self._writer.newest
        assert checkpoint is not None, "the last step is saved"
        found = self._evaluations if stopped is None else {**self._evaluations, "after": None}
        return RunResult(
            run_dir=self.run_dir.path,
            checkpoint=checkpoint,
            steps=int(checkpoint.name.removeprefix("step_")),
            episodes=self._monitor.episodes,
            seconds=time.monotonic() - self._start_s,
            stopped=stopped,
            **found,
        )

    def _conclude(self, gauges: RunGauges) -> RunResult:
        result = self._result()
        before, after = result.before, result.after
        self.run_dir.write_summary(
            {
                "accuracy_before": result.accuracy_before,
                "accuracy_after": result.accuracy_after,
                "evaluation_before": before.metrics() if before else None,
                "evaluation_after": after.metrics() if after else None,
                "seconds": result.seconds,
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
