"""Builds the parts of a controller, in the order in which they depend on each other."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from millrace.config import RunConfig
from millrace.controller import evaluation
from millrace.controller.admission import Admission, SyncBarrier
from millrace.controller.batches import Batches
from millrace.controller.buffer import Buffer
from millrace.controller.checkpointing import Checkpointing, CheckpointPosition, RunCheckpoints
from millrace.controller.controller import Controller
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.group_tracker import GroupTracker
from millrace.controller.orders import InOrder, build_group_order
from millrace.controller.policies import OtherPolicy, VersionBroadcasts
from millrace.controller.preemption import Preemption
from millrace.controller.reporting import RunReporter, TrainingState
from millrace.core.records import Task
from millrace.core.staleness import PolicyVersions
from millrace.environments.rollouts.partial_rollouts import PartialRollouts
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.turn_barrier import TurnBarrier
from millrace.inference.lending import GpuLending
from millrace.inference.pool import EnginePool
from millrace.journal import Journal, NoJournal
from millrace.monitoring.files.episodes import SkippedSteps
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.run_dir import RunDir
from millrace.run.resume import Cursor
from millrace.scoring.pool import ScorerPool
from millrace.tasks.streams import TaskStream
from millrace.training.group import StepsOnRecord, TrainerGroup
from millrace.weights.broadcaster import HttpNotifier, Subscription, VersionBroadcaster


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunParts:
    """What a controller is built from."""

    config: RunConfig
    tasks: TaskStream
    held_out: Sequence[Task]
    player: Player
    scorers: ScorerPool
    engines: EnginePool
    evaluators: EnginePool | None  # engines for evaluation alone
    trainer: TrainerGroup
    broadcaster: VersionBroadcaster
    monitor: RunMonitor
    run_dir: RunDir
    journal: Journal | NoJournal
    cursor: Cursor
    others: Sequence[OtherPolicy] = ()  # besides the first policy
    lagged: Sequence[VersionBroadcaster] = ()  # of earlier versions, which roles play
    versions: Mapping[str, int] = field(default_factory=dict[str, int])  # of several policies
    preemption: Preemption = field(default_factory=Preemption)

    @property
    def is_synchronous(self) -> bool:
        return self.config.weights.interrupt == "barrier"


def build_controller(run: RunParts) -> Controller:
    version, warn = run.cursor.version, run.monitor.warn
    run = replace(run, player=replace(run.player, turns=_build_turn_barrier(run)))
    state = TrainingState(version=version)
    dispatcher = build_dispatcher(run)
    batches = Batches(
        config=run.config,
        buffer=dispatcher.buffer,
        tracker=dispatcher.tracker,
        with_batch_advantages=run.scorers.with_batch_advantages,
        journal=run.journal,
    )
    _record_steps(run, batches)
    held = _follow_engines(run, dispatcher.admission, dispatcher.tracker.versions)
    for scorer in run.scorers.version_subscribers:
        run.broadcaster.subscribe(scorer.swap)
    notifier, notified = None, None
    if urls := run.config.weights.notify:
        timeout_s = run.config.supervision.transfer_timeout_s
        notifier = HttpNotifier(urls, timeout_s=timeout_s, warn=warn)
        notified = run.broadcaster.subscribe(notifier.receive)
    eval_set, eval_scheduler = _build_evaluation(run, held[None])
    writer = _build_writer(run)
    return Controller(
        config=run.config,
        state=state,
        dispatcher=dispatcher,
        batches=batches,
        trainer=run.trainer,
        others=run.others,
        broadcasts=VersionBroadcasts(sources=_sources(run), engines=held, notified=notified),
        eval_scheduler=eval_scheduler,
        checkpoints=RunCheckpoints(
            config=run.config,
            writer=writer,
            batches=batches,
            policy=run.cursor.policy,
            newest=CheckpointPosition(version=version, position=run.cursor.journal),
            on_checkpoint=run.monitor.saved,
        ),
        reporter=RunReporter(
            config=run.config,
            monitor=run.monitor,
            skipped=SkippedSteps(run.run_dir.skipped),
            state=state,
            dispatcher=dispatcher,
            eval_set=eval_set,
            notifier=notifier,
            uploads=writer.uploads,
        ),
        lending=_build_lending(run),
        preemption=run.preemption,
    )


def _build_turn_barrier(run: RunParts) -> TurnBarrier | None:
    """In exact mode rounding does not depend on the batch. Programs may wait for each other."""
    settings = run.config.environment
    plays_programs = bool(settings.command) or settings.external is not None
    if not run.is_synchronous or run.config.is_exact or plays_programs:
        return None
    others = [pool for pool in run.player.others.values() if isinstance(pool, EnginePool)]

    @contextlib.asynccontextmanager
    async def together() -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for pool in (run.engines, *others):
                await stack.enter_async_context(pool.together())
            yield

    return TurnBarrier(together, warn=run.monitor.warn)


def _sources(run: RunParts) -> list[tuple[VersionBroadcaster, TrainerGroup]]:
    """The broadcasters of all policies and of their earlier versions, and who trains these."""
    sources = [(run.broadcaster, run.trainer)]
    sources += [(other.broadcaster, other.trainer) for other in run.others]
    return [*sources, *((broadcaster, run.trainer) for broadcaster in run.lagged)]


def _record_steps(run: RunParts, batches: Batches) -> None:
    """A trainer that is replaced repeats steps from the journal, if there is one."""
    if not isinstance(run.journal, Journal):
        return
    version = run.cursor.version
    run.trainer.past = StepsOnRecord(batches.redo, version=version)
    for other in run.others:
        if other.trainer is not run.trainer:
            redo = partial(batches.redo, policy=other.name)
            other.trainer.past = StepsOnRecord(redo, version=version)


def _build_writer(run: RunParts) -> Checkpointing:
    return Checkpointing(
        run.trainer,
        folder=run.run_dir.checkpoints,
        version=run.cursor.version,
        warn=run.monitor.warn,
        settings=run.config.checkpoint,
        others=run.others,
    )


def _build_lending(run: RunParts) -> GpuLending:
    """Engines that stand still during a step, if they share a GPU with the trainer."""
    share_gpu, interrupt = run.config.cluster.share_gpu, run.config.weights.interrupt
    if share_gpu not in ("take_turns", "sleep"):
        return GpuLending()
    pools = [*dict.fromkeys((run.engines, *(other.engines for other in run.others)))]
    # Engines that stay asleep hand their sequences over, which may then have several versions.
    is_optional = share_gpu == "sleep" and interrupt not in ("drain", "barrier")
    return GpuLending(
        pools=pools if run.evaluators is None else [*pools, run.evaluators],
        sleeps=share_gpu == "sleep",
        optional=run.engines if is_optional else None,
        report=run.monitor.warn,
    )


def _follow_engines(
    run: RunParts, admission: Admission, versions: PolicyVersions
) -> dict[str | None, Subscription]:
    """Send versions to the engines; those of a step are visible once the engines of all policies
    hold them."""
    own = run.broadcaster.subscribe(run.engines.swap)
    held: dict[str | None, Subscription] = {None: own}
    held |= {other.name: other.versions for other in run.others}
    for broadcaster in run.lagged:
        broadcaster.subscribe(run.engines.swap)

    def advance(_version: int | None = None) -> None:
        steps = [versions.through(one.version, policy=policy) for policy, one in held.items()]
        admission.advance(min(steps))

    for one in held.values():
        one.on_version = advance
    versions.on_record = advance
    return held


def build_dispatcher(run: RunParts) -> Dispatcher:
    """The parts from task to buffer."""
    config, cursor, ledger = run.config, run.cursor, run.journal.ledger
    begun = ledger.redone(after=cursor.version)
    next_take = max(cursor.version, ledger.last_step)
    admission = Admission(
        groups_per_step=config.trainer.groups_per_step,
        limit=config.buffer.limit,
        max_running=config.max_running_groups,
        version=cursor.version,
        begun=len(begun),
        now=run.monitor.now,
    )
    admission.take_next(next_take)
    tracker = GroupTracker(
        tasks=run.tasks,
        journal=run.journal,
        admission=admission,
        solved_at=config.evaluate.solved_at,
        warn=run.monitor.warn,
        now=run.monitor.now,
        version=next_take,
        versions=PolicyVersions(run.versions, step=cursor.version),
        next_number=cursor.next_number,
        unfinished=cursor.unfinished,
        begun=begun,
    )
    # A synchronous run starts whole groups only, so that it is reproducible.
    has_partials = config.journal.is_on and not run.is_synchronous
    barrier = SyncBarrier(admission, together=run.engines.together) if run.is_synchronous else None
    buffer = Buffer(
        capacity=config.buffer_capacity,
        limit=config.buffer.limit,
        order=build_group_order(config.buffer.order, solved_at=config.evaluate.solved_at),
        on_drop=tracker.expired_in_buffer,
        versions=tracker.versions,
        steps=config.trainer.steps,
        now=run.monitor.now,
    )
    dispatcher = Dispatcher(
        player=run.player,
        scorers=run.scorers,
        buffer=buffer,
        admission=admission,
        tracker=tracker,
        partials=PartialRollouts(
            run.journal, every_s=config.journal.partial_every_s if has_partials else 0
        ),
        engines=run.engines,
        others={other.name: other.engines for other in run.others},
        group_size=config.rollout.num_scored,
        barrier=barrier,
    )
    if isinstance(buffer.order, InOrder):
        buffer.is_preceded = dispatcher.is_awaited
    if config.buffer.limit.waits and barrier is None:
        buffer.running = dispatcher.running
    return dispatcher


def _build_evaluation(
    run: RunParts, engine_versions: Subscription
) -> tuple[evaluation.EvalSet, evaluation.EvalScheduler]:
    eval_set = evaluation.EvalSet(
        tasks=run.held_out,
        config=run.config,
        player=run.player,
        engines=run.evaluators or run.engines,
        scorers=run.scorers,
        monitor=run.monitor,
    )
    schedule: dict[str, Any] = {
        "evaluate": eval_set.evaluate,
        "every_steps": run.config.evaluate.every_steps,
        "steps": run.config.trainer.steps,
        "version": run.cursor.version,
    }
    if run.evaluators is None:
        reached = engine_versions.reached if run.is_synchronous else None
        return eval_set, evaluation.SharedEvalScheduler(reached=reached, **schedule)
    pinned = evaluation.PinnedEvalScheduler(swap=run.evaluators.swap, **schedule)
    run.broadcaster.subscribe(pinned.receive, wants=pinned.wants)
    return eval_set, pinned
