"""The loop that wires the stages and owns Version.

     tasks ─▶ play ─▶ score ─▶ wait ─▶ learn ─▶ publish ─┐
      ▲                                                  │
      └──────────── swap, between two forward passes ◀───┘

Three activities run side by side on one event loop and meet in the buffer: the dispatcher fills it,
the learner empties it, and the courier carries each new version to the engines. Torch-free:
everything heavy is a call to a worker.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millrace.cluster.messages import Stepped
from millrace.config import RunConfig
from millrace.core.errors import CheckpointError, RunFailed
from millrace.core.microbatch import Batch
from millrace.core.records import Group, Task
from millrace.core.weight_update import WeightUpdate
from millrace.engines.pool import EnginePool
from millrace.envs.streams import TaskStream
from millrace.rollout.admission import RUNNING, STALENESS, Admission
from millrace.rollout.cancellation import Attempt
from millrace.rollout.dispatcher import Dispatcher, Failures
from millrace.rollout.evaluation import Evaluation
from millrace.rollout.examiner import Examiner, PinnedExaminer, SharedExaminer
from millrace.rollout.filtering import Filtering
from millrace.rollout.held_out import HeldOut
from millrace.rollout.player import Player
from millrace.rollout.rounds import Rounds
from millrace.scoring.advantages import PAIRS
from millrace.scoring.pool import ScorerPool
from millrace.scoring.tier.group_scoring import GroupScoring
from millrace.staging.batches import Batches
from millrace.staging.buffer import Buffer
from millrace.staging.orders import build_sampler
from millrace.staging.packing import minibatches_of
from millrace.training.remote import RemoteTrainer
from millrace.watch.scoring import where_text
from millrace.watch.skipped import SkippedSteps
from millrace.watch.text import counts
from millrace.watch.watcher import SCORES, Moment, Watcher
from millrace.weights.courier import Courier
from millrace.weights.followers import Followers
from millrace.weights.notifier import Notifier
from millrace.weights.releases import Releases

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run stands: what a checkpoint holds besides the trainer's own state."""

    version: int = 0  # = steps done
    next_number: int = 0  # first task number never issued
    unfinished: tuple[int, ...] = ()  # issued, and neither trained nor dropped nor failed
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])  # state of the task stream


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
        trainer: RemoteTrainer,
        watcher: Watcher,
        checkpoints: Path,
        skipped: SkippedSteps,
        cursor: Cursor,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._player = player
        self._scorers = scorers
        self._engines = engines
        self._evaluators = evaluators
        self._trainer = trainer
        self._watcher = watcher
        self._checkpoints = checkpoints
        self._skipped = skipped
        self._version = cursor.version
        self._awaits_batch = False  # the trainer has nothing to do
        self._saved: Path | None = None
        self._failures = Failures(max_share=config.rollout.max_failure_share)
        self._limit = config.buffer.limit
        self._admission = Admission(
            groups_per_step=config.trainer.groups_per_step,
            limit=self._limit,
            max_running=config.rollout.max_running_groups,
            version=cursor.version,
        )
        # With barrier, all work of a version is there before any of it begins.
        is_synchronous = config.weights.interrupt == "barrier"
        self._rounds = Rounds(self._admission, at_once=engines.at_once) if is_synchronous else None
        self._buffer = Buffer(
            capacity=config.buffer.capacity,
            limit=self._limit,
            sampler=build_sampler(config.buffer.order),
            on_drop=lambda waiting: self._dispatcher.expire_waiting(waiting),
        )
        self._batches = Batches(
            config,
            buffer=self._buffer,
            in_batch=scorers.in_batch,
            on_replay=self._admission.replay,
            pairs=config.scoring.advantages["type"] == PAIRS,
            in_order=is_synchronous,  # it need not depend on the groups' speed
        )
        self._dispatcher = Dispatcher(
            task_of=tasks.task,
            on_closed=tasks.finish,
            open_scoring=lambda task, attempt: scorers.open(number=attempt.number, task=task),
            play=self._play,
            score=self._score,
            admit=self._buffer.admit,
            admission=self._admission,
            failures=self._failures,
            filtering=Filtering(max_share=config.rollout.max_filtered_share, warn=watcher.warn),
            limit=self._limit,
            version=cursor.version,
            next_number=cursor.next_number,
            unfinished=cursor.unfinished,
        )
        self._courier = Courier(
            swap=engines.swap,
            release=lambda version: self._releases.begin(version),
            on_visible=self._admission.advance,
            version=cursor.version,
        )
        self._notifier = Notifier(
            config.weights.notify, timeout_s=config.weights.timeout_s, warn=watcher.warn
        )
        self._held_out = HeldOut(
            held_out,
            config=config,
            player=player,
            engine=evaluators or engines,
            score=scorers.examine,
            at_once=engines.at_once if is_synchronous else None,
        )
        self._followers = Followers(
            [follower.swap for follower in scorers.followers], version=cursor.version
        )
        self._examiner = self._make_examiner()
        self._releases = Releases(
            trainer.release,
            after=(
                self._followers.done_with,
                self._notifier.done_with,
                self._examiner.done_with,
            ),
        )

    async def run(self) -> Outcome:
        async with asyncio.TaskGroup() as activities:
            await self._examiner.begin(activities)
            dispatching = activities.create_task(self._dispatcher.run())
            delivering = activities.create_task(self._courier.run())
            following = activities.create_task(self._followers.run())
            notifying = activities.create_task(self._notifier.run())
            watching = activities.create_task(self._watcher.run(self.moment))
            starting = activities.create_task(self._rounds.run()) if self._rounds else None
            await self._learn(activities)
            if starting is not None:
                starting.cancel()
            dispatching.cancel()  # cancelling a group aborts its requests in the engines
            await self._courier.wait_visible(self._version)
            await self._examiner.conclude()
            await self._notifier.finish()
            if self._notifier.num_failed:
                self._watcher.warn(f"{self._notifier.num_failed} posts to weights.notify failed.")
            delivering.cancel()
            following.cancel()
            notifying.cancel()
            watching.cancel()
        checkpoint = self._saved
        assert checkpoint is not None
        return Outcome(
            steps=self._version,
            before=self._examiner.before,
            after=self._examiner.after,
            checkpoint=checkpoint,
        )

    def on_published(self, update: WeightUpdate) -> None:
        """The trainer has a new version ready; called from the hub."""
        self._courier.submit(update)
        self._followers.submit(update)
        self._notifier.submit(update)
        self._examiner.submit(update)

    def moment(self) -> Moment:
        """What the watcher shows between steps."""
        return Moment(
            version=self._version,
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
        )

    async def _learn(self, activities: asyncio.TaskGroup) -> None:
        """Take, pack, step, until the last step. The next batch is taken while this one is
        learned."""
        steps = self._config.trainer.steps
        upcoming = activities.create_task(self._batches.next(self._version))
        while self._version < steps:
            if self._rounds is not None:
                self._rounds.open()
            self._awaits_batch = True
            taken = await self._before_stall(upcoming)
            self._awaits_batch = False
            if self._rounds is not None:
                self._rounds.close()  # until this step's evaluation is over
            if self._version + 1 < steps:
                # Fit for the version this step makes, which is the trainer's when it is used.
                activities.create_task(self._expire(self._version + 1))
                upcoming = activities.create_task(self._batches.next(self._version + 1))
            stepped = await self._before_stall(self._step(taken.batches))
            await self._save_skipped(stepped, taken.groups)
            metrics = dict(stepped.metrics)
            if self._config.weights.notify:
                metrics["notify_failures"] = float(self._notifier.num_failed)
            self._watcher.step(
                self.moment(),
                groups=taken.groups,
                replayed=taken.replayed,
                trainer_metrics=metrics,
            )
            self._skipped.check(stepped.metrics)
            self._version += 1
            self._dispatcher.finish(group.number for group in taken.fresh)
            if not stepped.skipped:
                self._batches.trained(taken)
            await self._after_step()

    async def _expire(self, version: int) -> None:
        """Give up what is too old for a take at `version`, which is the next."""
        self._admission.take_next(version)
        self._dispatcher.expire(version)
        if self._limit.one_token_decides:
            await self._engines.expire(self._limit.oldest_at(version))

    async def _step(self, batches: tuple[Batch, ...]) -> Stepped:
        """Learn one batch. With cluster.take_turns the engines pause meanwhile; evaluations that
        are under way go on between two steps."""
        version = self._version + 1
        if not self._config.cluster.take_turns:
            return await self._trainer.step(*batches, version=version)
        pools = [pool for pool in (self._engines, self._evaluators) if pool is not None]
        await asyncio.gather(*(pool.pause() for pool in pools))
        stepped = await self._trainer.step(*batches, version=version)
        # Before the weights are published, which is copying and needs no turn of its own.
        # After a step that failed nobody resumes them: it ends the run.
        await asyncio.gather(*(pool.resume() for pool in pools))
        return stepped

    async def _save_skipped(self, stepped: Stepped, groups: list[Group]) -> None:
        if not stepped.skipped:
            self._skipped.went_well()
            return
        parts = minibatches_of(groups, num_minibatches=self._config.trainer.minibatches)
        num_updates = len(parts) * self._config.trainer.epochs
        bad = sorted({index % len(parts) for index in stepped.skipped})
        groups = [group for index in bad for group in parts[index]]
        path = await asyncio.to_thread(self._skipped.write, stepped.version, groups)
        which = f" ({len(stepped.skipped)} of its {num_updates} updates)" if num_updates > 1 else ""
        self._watcher.warn(
            f"step {stepped.version}{which} was skipped: its loss or gradient is not finite; what"
            f" it was given is in {path}."
        )

    async def _after_step(self) -> None:
        """Checkpoint and evaluate when due."""
        last = self._version == self._config.trainer.steps
        if last or _due(self._version, self._config.checkpoint.every_steps):
            await self._save(must_succeed=last)
        if not last:
            await self._examiner.after_step(self._version)

    async def _save(self, *, must_succeed: bool) -> None:
        directory = self._checkpoints / f"step_{self._version}"
        cursor = {**self._dispatcher.cursor(), "tasks": self._tasks.state()}
        run_state = {"version": self._version, **cursor}
        try:
            await self._trainer.save(directory, run_state=run_state)
        except CheckpointError as error:
            if must_succeed:
                raise
            self._watcher.warn(f"{error} The run goes on without this checkpoint.")
        else:
            self._saved = directory

    async def _evaluate(self, step: int) -> Evaluation | None:
        evaluation = await self._held_out.evaluate(step)
        if evaluation is not None:
            if evaluation.num_unscored:
                self._watcher.warn(
                    f"{evaluation.num_unscored} of {evaluation.num_tasks} held-out tasks have no"
                    " score and count as not solved: their scorers could not be asked for"
                    f" {self._config.evaluate.score_timeout_s:g} s."
                )
            self._watcher.evaluated(evaluation.metrics())
        return evaluation

    def _make_examiner(self) -> Examiner:
        due: dict[str, Any] = {
            "examine": self._evaluate,
            "every_steps": self._config.evaluate.every_steps,
            "steps": self._config.trainer.steps,
            "version": self._version,
        }
        if self._evaluators is not None:
            return PinnedExaminer(swap=self._evaluators.swap, **due)
        in_turns = None if self._rounds is None else self._courier.wait_visible
        return SharedExaminer(in_turns=in_turns, **due)

    async def _play(self, task: Task, attempt: Attempt, scoring: GroupScoring) -> Group:
        if self._rounds is not None:
            await self._rounds.turn()
        rollout = self._config.rollout
        num_episodes = rollout.group_size + rollout.oversample
        return await self._player.try_group(
            task,
            attempt=attempt,
            group_size=num_episodes,
            on_episode=scoring.add if scoring.takes_episodes else None,
            listen=scoring.listen,
        )

    async def _score(self, group: Group, scoring: GroupScoring) -> Group:
        judged = await self._scorers.judge(group, scoring)
        self._tasks.observe(group.number, judged.solve_rate(self._config.evaluate.solved_at))
        return await self._scorers.shape(judged)

    async def _before_stall(self, work: Awaitable[T]) -> T:
        """The result of `work`; a run in which nothing moves any more says so and ends."""
        limit_s = self._config.cluster.stall_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            moment = self.moment()
            raise RunFailed(
                f"No step completed for {limit_s:g} s (cluster.stall_timeout_s): the trainer waits"
                f" for {moment.trainer_waits_for}, the engines for {moment.engine_waits_for};"
                f" {moment.groups_running} groups are running, {moment.buffer_depth} are buffered,"
                f" and dropped so far: {counts(moment.groups_dropped)}."
                f"{_at_scorers(moment)}"
            ) from None

    def _engine_waits_for(self) -> str:
        if self._buffer.depth >= self._buffer.capacity:
            return "the trainer (buffer full)"
        is_scoring = self._dispatcher.scoring > 0
        return {
            None: "tasks",
            # The trainer may be the one that waits: for groups that are still being judged.
            STALENESS: SCORES
            if is_scoring and self._awaits_batch
            else "the trainer (staleness limit)",
            RUNNING: SCORES if is_scoring else "rollout.max_running_groups",
        }[self._admission.held_by]

    def _trainer_waits_for(self) -> str:
        if self._dispatcher.scoring > self._dispatcher.playing:
            return SCORES
        return "generation" if self._dispatcher.playing else "the next batch"


def _at_scorers(moment: Moment) -> str:
    """Where the groups are that the trainer waits for, if they are there."""
    if moment.trainer_waits_for != SCORES:
        return ""
    return f" In scoring: {where_text(moment.scorers)}."


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
