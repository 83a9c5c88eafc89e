"""Makes the parts of a controller, in the order in which they depend on each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import RunConfig
from millrace.controller.admission import Admission
from millrace.controller.barrier import SyncBarrier
from millrace.controller.batches import Batches
from millrace.controller.buffer import Buffer
from millrace.controller.checkpointing import RunCheckpoints
from millrace.controller.controller import Controller, Cursor
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.eval_schedule import (
    EvalScheduler,
    PinnedEvalScheduler,
    SharedEvalScheduler,
)
from millrace.controller.evaluation import EvalSet
from millrace.controller.group_tracker import GroupTracker
from millrace.controller.learner import Learner
from millrace.controller.orders import build_sampler
from millrace.controller.reporting import LearnerState, RunReporter
from millrace.core.clock import REAL_CLOCK
from millrace.core.records import Task
from millrace.environments.rollouts.partial_rollouts import PartialRollouts
from millrace.environments.rollouts.player import Player
from millrace.inference.pool import EnginePool
from millrace.journal import Journal, NoJournal
from millrace.monitoring.files.skipped_steps import SkippedSteps
from millrace.monitoring.monitor import RunMonitor
from millrace.scoring.pool import ScorerPool
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.schedule import Checkpointing
from millrace.training.group import TrainerGroup
from millrace.training.past_steps import StepsOnRecord
from millrace.weights.broadcaster import Subscription, VersionBroadcaster
from millrace.weights.http_notifier import HttpNotifier


def build_controller(
    config: RunConfig,
    *,
    tasks: TaskStream,
    held_out: Sequence[Task],
    player: Player,
    scorers: ScorerPool,
    engines: EnginePool,
    evaluators: EnginePool | None,
    trainer: TrainerGroup,
    broadcaster: VersionBroadcaster,
    monitor: RunMonitor,
    checkpoints: Path,
    skipped: SkippedSteps,
    journal: Journal | NoJournal,
    cursor: Cursor,
) -> Controller:
    """`evaluators`: engines for evaluation alone. `checkpoints`: folder to write them to."""
    state = LearnerState(version=cursor.version)
    flow = _build_flow(
        config,
        tasks=tasks,
        player=player,
        scorers=scorers,
        engines=engines,
        journal=journal,
        monitor=monitor,
        cursor=cursor,
    )
    if isinstance(journal, Journal):
        trainer.past = StepsOnRecord(flow.batches.redo, version=cursor.version)
    engine_versions = broadcaster.subscribe(engines.swap, on_version=flow.admission.advance)
    for scorer in scorers.version_subscribers:
        broadcaster.subscribe(scorer.swap)
    notifier, notified_versions = None, None
    if config.weights.notify:
        notifier = HttpNotifier(
            config.weights.notify, timeout_s=config.weights.timeout_s, warn=monitor.warn
        )
        notified_versions = broadcaster.subscribe(notifier.receive)
    eval_set = EvalSet(
        held_out,
        config=config,
        player=player,
        engines=evaluators or engines,
        scorers=scorers,
        monitor=monitor,
    )
    eval_scheduler = _build_eval_scheduler(
        config,
        eval_set=eval_set,
        evaluators=evaluators,
        broadcaster=broadcaster,
        engine_versions=engine_versions,
        version=cursor.version,
    )
    reporter = RunReporter(
        config,
        monitor=monitor,
        skipped=skipped,
        state=state,
        dispatcher=flow.dispatcher,
        tracker=flow.tracker,
        admission=flow.admission,
        buffer=flow.buffer,
        scorers=scorers,
        engines=engines,
        partials=flow.partials,
        eval_set=eval_set,
        notifier=notifier,
    )
    run_checkpoints = RunCheckpoints(
        config,
        writer=Checkpointing(
            trainer, folder=checkpoints, version=cursor.version, warn=monitor.warn
        ),
        journal=journal,
        batches=flow.batches,
        tracker=flow.tracker,
        tasks=tasks,
        version=cursor.version,
        position=cursor.journal,
    )
    pools = [engines] if evaluators is None else [engines, evaluators]
    learner = Learner(
        config,
        state=state,
        batches=flow.batches,
        trainer=trainer,
        dispatcher=flow.dispatcher,
        checkpoints=run_checkpoints,
        eval_scheduler=eval_scheduler,
        reporter=reporter,
        paused=pools if config.cluster.take_turns else (),
        barrier=flow.barrier,
    )
    return Controller(
        batches=flow.batches,
        dispatcher=flow.dispatcher,
        learner=learner,
        state=state,
        trainer=trainer,
        broadcaster=broadcaster,
        engine_versions=engine_versions,
        notified_versions=notified_versions,
        eval_scheduler=eval_scheduler,
        checkpoints=run_checkpoints,
        reporter=reporter,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Flow:
    """The parts from task to batch."""

    admission: Admission
    barrier: SyncBarrier | None
    tracker: GroupTracker
    buffer: Buffer
    batches: Batches
    partials: PartialRollouts
    dispatcher: Dispatcher


def _build_flow(
    config: RunConfig,
    *,
    tasks: TaskStream,
    player: Player,
    scorers: ScorerPool,
    engines: EnginePool,
    journal: Journal | NoJournal,
    monitor: RunMonitor,
    cursor: Cursor,
) -> _Flow:
    is_synchronous = config.weights.interrupt == "barrier"
    limit, clock = config.buffer.limit, REAL_CLOCK
    begun = journal.ledger.redone(after=cursor.version)
    next_take = max(cursor.version, journal.ledger.last_step)
    admission = Admission(
        groups_per_step=config.trainer.groups_per_step,
        limit=limit,
        max_running=config.rollout.max_running_groups,
        version=cursor.version,
        begun=len(begun),
        clock=clock,
    )
    admission.take_next(next_take)
    barrier = SyncBarrier(admission, together=engines.together) if is_synchronous else None
    tracker = GroupTracker(
        tasks=tasks,
        journal=journal,
        admission=admission,
        solved_at=config.evaluate.solved_at,
        max_failure_share=config.rollout.max_failure_share,
        max_filtered_share=config.rollout.max_filtered_share,
        warn=monitor.warn,
        version=next_take,
        next_number=cursor.next_number,
        unfinished=cursor.unfinished,
        begun=begun,
    )
    buffer = Buffer(
        capacity=config.buffer.capacity,
        limit=limit,
        sampler=build_sampler(config.buffer.order),
        on_drop=tracker.expired_in_buffer,
        clock=clock,
    )
    batches = Batches(
        config,
        buffer=buffer,
        admission=admission,
        tracker=tracker,
        in_batch=scorers.in_batch,
        journal=journal,
    )
    # A synchronous run starts whole groups only, so that it comes out the same each time.
    has_partials = config.journal.enabled and not is_synchronous
    every_s = config.journal.partial_every_s if has_partials else 0
    partials = PartialRollouts(journal, every_s=every_s)
    dispatcher = Dispatcher(
        tasks=tasks,
        player=player,
        scorers=scorers,
        buffer=buffer,
        admission=admission,
        tracker=tracker,
        partials=partials,
        engines=engines,
        limit=limit,
        group_size=config.rollout.group_size + config.rollout.oversample,
        barrier=barrier,
    )
    return _Flow(
        admission=admission,
        barrier=barrier,
        tracker=tracker,
        buffer=buffer,
        batches=batches,
        partials=partials,
        dispatcher=dispatcher,
    )


def _build_eval_scheduler(
    config: RunConfig,
    *,
    eval_set: EvalSet,
    evaluators: EnginePool | None,
    broadcaster: VersionBroadcaster,
    engine_versions: Subscription,
    version: int,
) -> EvalScheduler:
    schedule: dict[str, Any] = {
        "evaluate": eval_set.evaluate,
        "every_steps": config.evaluate.every_steps,
        "steps": config.trainer.steps,
        "version": version,
    }
    if evaluators is None:
        is_synchronous = config.weights.interrupt == "barrier"
        reached = engine_versions.reached if is_synchronous else None
        return SharedEvalScheduler(reached=reached, **schedule)
    pinned = PinnedEvalScheduler(swap=evaluators.swap, **schedule)
    broadcaster.subscribe(pinned.receive, wants=pinned.wants)
    return pinned
