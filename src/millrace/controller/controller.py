"""Wires the stages of a run.

     tasks ─▶ play ─▶ score ─▶ wait ─▶ learn ─▶ publish ─┐
      ▲                                                  │
      └──────────── swap, between two forward passes ◀───┘

Three activities run side by side on one event loop and meet in the buffer: the dispatcher fills it,
the learner empties it, and the broadcaster sends each new version to the engines. Torch-free:
everything heavy is a call to a worker.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.controller.admission import RUNNING, STALENESS, Admission
from millrace.controller.barrier import SyncBarrier
from millrace.controller.batches import Batches
from millrace.controller.buffer import Buffer
from millrace.controller.dispatcher import Dispatcher, Failures
from millrace.controller.drops import Filtering
from millrace.controller.eval_schedule import (
    EvalScheduler,
    PinnedEvalScheduler,
    SharedEvalScheduler,
)
from millrace.controller.evaluation import EvalSet, Evaluation, Tally
from millrace.controller.learner import Learner
from millrace.controller.orders import build_sampler
from millrace.core.records import Group, Task
from millrace.core.weight_update import WeightUpdate
from millrace.environments.rollouts.attempt import Attempt
from millrace.environments.rollouts.partial_rollouts import PartialRollouts
from millrace.environments.rollouts.player import Player
from millrace.inference.pool import EnginePool
from millrace.journal import Journal, NoJournal
from millrace.monitoring.files.skipped_steps import SkippedSteps
from millrace.monitoring.monitor import SCORES, RunGauges, RunMonitor
from millrace.scoring.advantages.estimators import PAIRS
from millrace.scoring.pool import ScorerPool
from millrace.scoring.scheduling.group_scoring import GroupScoring
from millrace.tasks.streams import TaskStream
from millrace.training.group import TrainerGroup
from millrace.training.past_steps import StepsOnRecord
from millrace.weights.broadcaster import VersionBroadcaster
from millrace.weights.http_notifier import HttpNotifier


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run stands: what a checkpoint holds besides the trainer's own state."""

    version: int = 0  # = steps done
    next_number: int = 0  # first task number never issued
    unfinished: tuple[int, ...] = ()  # issued, and neither trained nor dropped nor failed
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])  # state of the task stream
    journal: int | None = None  # its last record then; None = there was no journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    steps: int
    before: Evaluation | None
    after: Evaluation | None
    checkpoint: Path


class Controller:
    def __init__(
        self,
        config: RunConfig,
        *,
        tasks: TaskStream,
        held_out: Sequence[Task],
        player: Player,
        scorers: ScorerPool,
        engines: EnginePool,
        evaluators: EnginePool | None,
        trainer: TrainerGroup,
        watcher: RunMonitor,
        checkpoints: Path,
        skipped: SkippedSteps,
        journal: Journal | NoJournal,
        cursor: Cursor,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._player = player
        self._scorers = scorers
        self._engines = engines
        self._trainer = trainer
        self._evaluators = evaluators
        self._watcher = watcher
        self._skipped = skipped
        self._journal = journal
        begun = journal.ledger.redone(after=cursor.version)
        taking = max(cursor.version, journal.ledger.last_step)  # version of the first new take
        # Where a run must come out the same each time, all of a group begins together.
        goes_on = config.journal.enabled and config.weights.interrupt != "barrier"
        self._courses = PartialRollouts(
            journal, every_s=config.journal.partial_every_s if goes_on else 0
        )
        self._tallies: list[Tally] = []  # of the evaluations under way
        self._failures = Failures(max_share=config.rollout.max_failure_share)
        self._limit = config.buffer.limit
        self._admission = Admission(
            groups_per_step=config.trainer.groups_per_step,
            limit=self._limit,
            max_running=config.rollout.max_running_groups,
            version=cursor.version,
            begun=len(begun),
        )
        self._admission.take_next(taking)
        # With barrier, all work of a version is there before any of it begins.
        is_synchronous = config.weights.interrupt == "barrier"
        self._rounds = (
            SyncBarrier(self._admission, together=engines.together) if is_synchronous else None
        )
        self._buffer = Buffer(
            capacity=config.buffer.capacity,
            limit=self._limit,
            sampler=build_sampler(config.buffer.order),
            on_drop=lambda waiting: self._dispatcher.expire_waiting(waiting),
        )
        self._batches = Batches(
            config,
            buffer=self._buffer,
            journal=journal,
            in_batch=scorers.in_batch,
            on_replay=self._admission.replay,
            pairs=config.scoring.advantages["type"] == PAIRS,
            in_order=is_synchronous,  # it need not depend on the groups' speed
        )
        if isinstance(journal, Journal):
            trainer.past = StepsOnRecord(self._batches.redo, version=cursor.version)
        self._dispatcher = self._make_dispatcher(cursor, begun=begun, version=taking)
        self._broadcaster = VersionBroadcaster(version=cursor.version)
        self._delivered = self._broadcaster.subscribe(
            engines.swap, on_version=self._admission.advance
        )
        self._notifier = HttpNotifier(
            config.weights.notify, timeout_s=config.weights.timeout_s, warn=watcher.warn
        )
        self._notified = self._broadcaster.subscribe(self._notifier.receive)
        for scorer in scorers.version_subscribers:
            self._broadcaster.subscribe(scorer.swap)
        self._held_out = EvalSet(
            held_out,
            config=config,
            player=player,
            engine=evaluators or engines,
            score=scorers.evaluate,
            together=engines.together if is_synchronous else None,
        )
        self._examiner = self._make_examiner(version=cursor.version)
        self._learner = self._make_learner(cursor, checkpoints=checkpoints)

    async def run(self) -> Outcome:
        with contextlib.closing(self._learner):
            return await self._run()

    async def _run(self) -> Outcome:
        await self._batches.restore(self._learner.version)
        waiting = await self._journal.read_groups(list(self._journal.ledger.waiting))
        async with asyncio.TaskGroup() as activities:
            watching = activities.create_task(self._watcher.run(self.moment))
            await self._examiner.begin(activities)
            self._watcher.begin_training()
            dispatching = activities.create_task(self._dispatcher.run(waiting))
            noting = activities.create_task(self._courses.run())
            broadcasting = activities.create_task(self._broadcaster.run(self._trainer))
            starting = activities.create_task(self._rounds.run()) if self._rounds else None
            await self._learner.run(activities)
            if starting is not None:
                starting.cancel()
            noting.cancel()
            dispatching.cancel()  # cancelling a group aborts its requests in the engines
            await self._delivered.reached(self._learner.version)
            await self._examiner.finish()
            await self._notified.idle()
            if self._notifier.num_failed:
                self._watcher.warn(f"{self._notifier.num_failed} posts to weights.notify failed.")
            broadcasting.cancel()
            watching.cancel()
        checkpoint = self._learner.newest_checkpoint
        assert checkpoint is not None
        return Outcome(
            steps=self._learner.version,
            before=self._examiner.before,
            after=self._examiner.after,
            checkpoint=checkpoint,
        )

    def on_published(self, update: WeightUpdate) -> None:
        """The trainer has a new version ready; called from the hub."""
        self._trainer.published(update)
        self._broadcaster.publish(update)

    def on_restored(self, update: WeightUpdate) -> None:
        """A restarted trainer lends its newest version, which its predecessor may not have
        published."""
        self._broadcaster.publish(update)

    def moment(self) -> RunGauges:
        """What the watcher shows between steps."""
        return RunGauges(
            version=self._learner.version,
            buffer_depth=self._buffer.depth,
            groups_running=self._admission.running,
            groups_dropped=dict(self._dispatcher.dropped),
            groups_cancelled=dict(self._dispatcher.cancellations.by_reason),
            tokens_wasted={**self._dispatcher.waste.tokens, **self._scorers.tokens_wasted},
            wasted_staleness=self._dispatcher.waste.staleness_means,
            tokens_saved=round(self._dispatcher.cancellations.tokens_saved),
            groups_failed=dict(self._failures.by_reason),
            steps_skipped=self._skipped.num_steps,
            last_failure=self._failures.last_sentence,
            engine_waits_for=self._engine_waits_for(),
            trainer_waits_for=self._trainer_waits_for(),
            scorers=self._scorers.loads(),
            sequences_continued=self._engines.resumed.sequences,
            resumed_tokens=self._courses.num_resumed,
            evaluating=self._evaluating,
        )

    @property
    def _evaluating(self) -> tuple[int, int] | None:
        """Held-out tasks that are done and in total, while an evaluation is under way."""
        if not self._tallies:
            return None
        return sum(t.num_scored for t in self._tallies), sum(t.num_tasks for t in self._tallies)

    async def _expire(self, version: int) -> None:
        """Give up what is too old for a take at `version`, which is the next."""
        self._admission.take_next(version)
        self._dispatcher.expire(version)
        if self._limit.one_token_decides:
            await self._engines.expire(self._limit.oldest_at(version))

    def _run_state(self) -> dict[str, Any]:
        return {**self._dispatcher.cursor(), "tasks": self._tasks.state()}

    async def _evaluate(self, step: int) -> Evaluation | None:
        tally = self._held_out.tally(step)
        stalls = StallWatchdog(
            warn_after_s=self._config.supervision.stall_warning_s,
            limit_s=math.inf,  # its engines and scorers have limits of their own
            what="No held-out task got on",
            explain=lambda: str(tally),
            moved=lambda: tally.moved,
            warn=self._watcher.warn,
        )
        self._tallies.append(tally)
        try:
            evaluation = await stalls.until(self._held_out.evaluate(step, tally=tally))
        finally:
            self._tallies.remove(tally)
        if evaluation is not None:
            if evaluation.num_unscored:
                self._watcher.warn(
                    f"{evaluation.num_unscored} of {evaluation.num_tasks} held-out tasks have no"
                    " score and count as not solved: their scorers could not be asked for"
                    f" {self._config.evaluate.score_timeout_s:g} s."
                )
            self._watcher.evaluated(evaluation.metrics())
        return evaluation

    def _make_dispatcher(
        self, cursor: Cursor, *, begun: Sequence[int], version: int
    ) -> Dispatcher[GroupScoring]:
        """`version` is that of the first new take; `begun` are in steps that are to be redone."""
        return Dispatcher(
            task_of=self._tasks.task,
            draw_of=self._tasks.draw_of,
            on_closed=self._tasks.finish,
            open_scoring=lambda task, attempt: self._scorers.open(number=attempt.number, task=task),
            play=self._play,
            score=self._score,
            admit=self._buffer.admit,
            admission=self._admission,
            failures=self._failures,
            filtering=Filtering(
                max_share=self._config.rollout.max_filtered_share, warn=self._watcher.warn
            ),
            limit=self._limit,
            journal=self._journal,
            courses=self._courses,
            version=version,
            next_number=cursor.next_number,
            unfinished=cursor.unfinished,
            begun=begun,
        )

    def _make_learner(self, cursor: Cursor, *, checkpoints: Path) -> Learner:
        pools = [pool for pool in (self._engines, self._evaluators) if pool is not None]
        return Learner(
            self._config,
            version=cursor.version,
            batches=self._batches,
            journal=self._journal,
            trainer=self._trainer,
            dispatcher=self._dispatcher,
            examiner=self._examiner,
            notifier=self._notifier,
            rounds=self._rounds,
            pools=pools if self._config.cluster.take_turns else (),
            watcher=self._watcher,
            skipped=self._skipped,
            checkpoints=checkpoints,
            moment=self.moment,
            expire=self._expire,
            run_state=self._run_state,
            resumed_at=cursor.journal,
        )

    def _make_examiner(self, *, version: int) -> EvalScheduler:
        due: dict[str, Any] = {
            "evaluate": self._evaluate,
            "every_steps": self._config.evaluate.every_steps,
            "steps": self._config.trainer.steps,
            "version": version,
        }
        if self._evaluators is None:
            reached = None if self._rounds is None else self._delivered.reached
            return SharedEvalScheduler(reached=reached, **due)
        pinned = PinnedEvalScheduler(swap=self._evaluators.swap, **due)
        self._broadcaster.subscribe(pinned.receive, wants=pinned.wants)
        return pinned

    async def _play(self, task: Task, attempt: Attempt, scoring: GroupScoring) -> Group:
        if self._rounds is not None:
            await self._rounds.turn()
        rollout = self._config.rollout
        num_episodes = rollout.group_size + rollout.oversample
        return await self._player.try_group(
            task,
            attempt=attempt,
            group_size=num_episodes,
            scoring=scoring,
        )

    async def _score(self, group: Group, scoring: GroupScoring) -> Group:
        judged = await self._scorers.score(group, scoring)
        number, solve_rate = group.number, judged.solve_rate(self._config.evaluate.solved_at)
        self._tasks.observe(number, solve_rate)
        self._journal.record_solve_rate(
            number, solve_rate=solve_rate, draw=self._tasks.draw_of(number)
        )
        return await self._scorers.shape(judged)

    def _engine_waits_for(self) -> str:
        if self._buffer.depth >= self._buffer.capacity:
            return "the trainer (buffer full)"
        is_scoring = self._dispatcher.scoring > 0
        return {
            None: "tasks",
            # The trainer may be the one that waits: for groups that are still being judged.
            STALENESS: SCORES
            if is_scoring and self._learner.awaits_batch
            else "the trainer (staleness limit)",
            RUNNING: SCORES if is_scoring else "rollout.max_running_groups",
        }[self._admission.held_by]

    def _trainer_waits_for(self) -> str:
        if self._dispatcher.scoring > self._dispatcher.playing:
            return SCORES
        return "generation" if self._dispatcher.playing else "the next batch"
