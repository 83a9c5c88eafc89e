"""The loop that wires the stages and owns Version.

     tasks ─▶ play ─▶ score ─▶ wait ─▶ learn ─▶ publish ─┐
      ▲                                                  │
      └──────────── swap, between two forward passes ◀───┘

Three activities run side by side on one event loop and meet in the buffer: the dispatcher fills it,
the learner empties it, and the courier carries each new version to the engines. Torch-free:
everything heavy is a call to a worker.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from millrace.cluster.messages import Stepped
from millrace.config import RunConfig
from millrace.core.errors import CheckpointError, RunFailed, WorkerError
from millrace.core.microbatch import Batch
from millrace.core.records import Group, Task
from millrace.core.weight_update import WeightUpdate
from millrace.engines.pool import EnginePool
from millrace.rollout.admission import RUNNING, STALENESS, Admission
from millrace.rollout.cancellation import Attempt
from millrace.rollout.dispatcher import Dispatcher, Failures
from millrace.rollout.evaluation import Evaluation, evaluate
from millrace.rollout.player import Player
from millrace.rollout.rounds import Rounds
from millrace.scoring.advantages import PAIRS
from millrace.scoring.pool import ScorerPool
from millrace.staging.buffer import Buffer
from millrace.staging.packing import minibatches_of, pack_minibatches
from millrace.training.remote import RemoteTrainer
from millrace.watch.skipped import SkippedSteps
from millrace.watch.watcher import Moment, Watcher
from millrace.weights.courier import Courier
from millrace.weights.notifier import Notifier

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run stands: what a checkpoint holds besides the trainer's own state."""

    version: int = 0  # = steps done
    next_number: int = 0  # first task number never issued
    unfinished: tuple[int, ...] = ()  # issued, and neither trained nor dropped nor failed


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
        task_of: Callable[[int], Task],
        held_out: Sequence[Task],
        player: Player,
        scorers: ScorerPool,
        engines: EnginePool,
        trainer: RemoteTrainer,
        watcher: Watcher,
        checkpoints: Path,
        skipped: SkippedSteps,
        cursor: Cursor,
    ) -> None:
        self._config = config
        self._held_out = held_out
        self._player = player
        self._scorers = scorers
        self._engines = engines
        self._trainer = trainer
        self._watcher = watcher
        self._checkpoints = checkpoints
        self._skipped = skipped
        self._version = cursor.version
        self._saved: Path | None = None
        self._failures = Failures(max_share=config.rollout.max_failure_share)
        self._admission = Admission(
            groups_per_step=config.trainer.groups_per_step,
            max_staleness=config.buffer.max_staleness,
            max_running=config.rollout.max_running_groups,
            version=cursor.version,
        )
        # With barrier, all work of a version is there before any of it begins.
        is_synchronous = config.weights.interrupt == "barrier"
        self._rounds = Rounds(self._admission, at_once=engines.at_once) if is_synchronous else None
        self._buffer = Buffer(
            capacity=config.buffer.capacity,
            max_staleness=config.buffer.max_staleness,
            on_drop=lambda group: self._dispatcher.expire_waiting(group),
        )
        self._dispatcher = Dispatcher(
            task_of=task_of,
            play=self._play,
            score=scorers.score,
            admit=self._buffer.admit,
            admission=self._admission,
            failures=self._failures,
            next_number=cursor.next_number,
            unfinished=cursor.unfinished,
        )
        self._courier = Courier(
            swap=engines.swap,
            release=self._release,
            on_visible=self._admission.advance,
            version=cursor.version,
        )
        self._notifier = Notifier(
            config.weights.notify, timeout_s=config.weights.timeout_s, warn=watcher.warn
        )
        self._releasing: set[asyncio.Task[None]] = set()

    async def run(self) -> Outcome:
        before = await self._evaluate_and_log()
        async with asyncio.TaskGroup() as activities:
            dispatching = activities.create_task(self._dispatcher.run())
            delivering = activities.create_task(self._courier.run())
            notifying = activities.create_task(self._notifier.run())
            watching = activities.create_task(self._watcher.run(self.moment))
            starting = activities.create_task(self._rounds.run()) if self._rounds else None
            await self._learn(activities)
            if starting is not None:
                starting.cancel()
            dispatching.cancel()  # cancelling a group aborts its requests in the engines
            await self._courier.wait_visible(self._version)
            after = await self._evaluate_and_log()
            await self._notifier.finish()
            if self._notifier.num_failed:
                self._watcher.warn(f"{self._notifier.num_failed} posts to weights.notify failed.")
            delivering.cancel()
            notifying.cancel()
            watching.cancel()
        checkpoint = self._saved
        assert checkpoint is not None
        return Outcome(steps=self._version, before=before, after=after, checkpoint=checkpoint)

    def on_published(self, update: WeightUpdate) -> None:
        """The trainer has a new version ready; called from the hub."""
        self._courier.submit(update)
        self._notifier.submit(update)

    def moment(self) -> Moment:
        """What the watcher shows between steps."""
        return Moment(
            version=self._version,
            buffer_depth=self._buffer.depth,
            groups_running=self._admission.running,
            groups_dropped=dict(self._dispatcher.dropped),
            groups_cancelled=dict(self._dispatcher.cancellations.by_reason),
            tokens_lost=self._dispatcher.cancellations.tokens_lost,
            tokens_saved=round(self._dispatcher.cancellations.tokens_saved),
            groups_failed=dict(self._failures.by_reason),
            steps_skipped=self._skipped.num_steps,
            last_failure=self._failures.last_sentence,
            engine_waits_for=self._engine_waits_for(),
            trainer_waits_for=self._trainer_waits_for(),
        )

    async def _learn(self, activities: asyncio.TaskGroup) -> None:
        """Take, pack, step, until the last step. The next batch is taken while this one is
        learned."""
        steps = self._config.trainer.steps
        upcoming = activities.create_task(self._next_batch(self._version))
        while self._version < steps:
            if self._rounds is not None:
                self._rounds.open()
            groups, batches = await self._before_stall(upcoming)
            if self._rounds is not None:
                self._rounds.close()  # until this step's evaluation is over
            if self._version + 1 < steps:
                # Fit for the version this step makes, which is the trainer's when it is used.
                activities.create_task(self._expire(self._version + 1))
                upcoming = activities.create_task(self._next_batch(self._version + 1))
            stepped = await self._before_stall(self._step(batches))
            await self._save_skipped(stepped, groups)
            metrics = dict(stepped.metrics)
            if self._config.weights.notify:
                metrics["notify_failures"] = float(self._notifier.num_failed)
            self._watcher.step(self.moment(), groups=groups, trainer_metrics=metrics)
            self._skipped.check(stepped.metrics)
            self._version += 1
            self._dispatcher.finish(group.number for group in groups)
            await self._after_step(activities)

    async def _expire(self, version: int) -> None:
        """Give up what is too old for a take at `version`, which is the next."""
        before = version - self._config.buffer.max_staleness
        self._admission.take_next(version)
        self._dispatcher.expire(before)
        await self._engines.expire(before)

    async def _next_batch(self, version: int) -> tuple[list[Group], tuple[Batch, ...]]:
        taken = await self._buffer.take(self._config.trainer.groups_per_step, version=version)
        if self._rounds is not None:  # all are there: their order need not depend on their speed
            taken.sort(key=lambda group: group.number)
        return await asyncio.to_thread(self._pack, taken)

    def _pack(self, taken: list[Group]) -> tuple[list[Group], tuple[Batch, ...]]:
        groups = self._scorers.in_batch(taken)
        batches = pack_minibatches(
            groups,
            num_minibatches=self._config.trainer.minibatches,
            microbatch_tokens=self._config.trainer.microbatch_tokens,
            pairs=self._config.scoring.advantages["type"] == PAIRS,
        )
        return groups, batches

    async def _step(self, batches: tuple[Batch, ...]) -> Stepped:
        """Learn one batch. With cluster.take_turns the engines pause meanwhile; evaluations that
        are under way go on between two steps."""
        version = self._version + 1
        if not self._config.cluster.take_turns:
            return await self._trainer.step(*batches, version=version)
        await self._engines.pause()
        stepped = await self._trainer.step(*batches, version=version)
        # Before the weights are published, which is copying and needs no turn of its own.
        # After a step that failed nobody resumes them: it ends the run.
        await self._engines.resume()
        return stepped

    async def _save_skipped(self, stepped: Stepped, groups: list[Group]) -> None:
        if not stepped.skipped:
            self._skipped.went_well()
            return
        parts = minibatches_of(groups, num_minibatches=self._config.trainer.minibatches)
        bad = [group for index in stepped.skipped for group in parts[index]]
        path = await asyncio.to_thread(self._skipped.write, stepped.version, bad)
        which = "" if len(parts) == 1 else f" ({len(stepped.skipped)} of its {len(parts)} updates)"
        self._watcher.warn(
            f"step {stepped.version}{which} was skipped: its loss or gradient is not finite; what"
            f" it was given is in {path}."
        )

    async def _after_step(self, activities: asyncio.TaskGroup) -> None:
        """Checkpoint and evaluate when due."""
        last = self._version == self._config.trainer.steps
        if last or _due(self._version, self._config.checkpoint.every_steps):
            await self._save(must_succeed=last)
        if not last and _due(self._version, self._config.evaluate.every_steps):
            if self._rounds is not None:
                await self._courier.wait_visible(self._version)
                await self._evaluate_and_log()
            else:
                activities.create_task(self._evaluate_and_log())

    async def _save(self, *, must_succeed: bool) -> None:
        directory = self._checkpoints / f"step_{self._version}"
        run_state = {"version": self._version, **self._dispatcher.cursor()}
        try:
            await self._trainer.save(directory, run_state=run_state)
        except CheckpointError as error:
            if must_succeed:
                raise
            self._watcher.warn(f"{error} The run goes on without this checkpoint.")
        else:
            self._saved = directory

    async def _evaluate_and_log(self) -> Evaluation | None:
        step = self._version
        evaluation = await self._evaluate()
        if evaluation is not None:
            self._watcher.evaluated(step, evaluation.accuracy)
        return evaluation

    async def _evaluate(self) -> Evaluation | None:
        if not self._held_out:
            return None
        max_running = self._config.engine.max_sequences * self._config.engine.count
        if self._rounds is None:
            return await self._evaluate_by(max_running)
        async with self._engines.at_once():
            evaluating = asyncio.create_task(self._evaluate_by(len(self._held_out)))
        return await evaluating

    async def _evaluate_by(self, max_running: int) -> Evaluation:
        greedy, version = self._player.greedy(), self._version
        return await evaluate(
            self._held_out,
            play=lambda task, number: greedy.play(
                task, number=number, group_size=1, name=f"evaluation {version}, task"
            ),
            score=self._scorers.score,
            solved_at=self._config.evaluate.solved_at,
            max_running=max_running,
        )

    async def _play(self, task: Task, attempt: Attempt) -> Group:
        if self._rounds is not None:
            await self._rounds.turn()
        return await self._player.try_group(
            task, attempt=attempt, group_size=self._config.rollout.group_size
        )

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
                f" {moment.groups_running} groups are running, {moment.buffer_depth} are buffered."
            ) from None

    def _release(self, version: int) -> None:
        """Tell the trainer, without making the next delivery wait for its answer."""

        async def release() -> None:
            await self._notifier.done_with(version)
            await self._trainer.release(version)

        task = asyncio.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releasing.discard(task)
        # A trainer that died is reported, with its traceback, by whoever watches the workers.
        if not task.cancelled() and not isinstance(task.exception(), WorkerError | None):
            task.result()

    def _engine_waits_for(self) -> str:
        if self._buffer.depth >= self._buffer.capacity:
            return "the trainer (buffer full)"
        return {
            None: "tasks",
            STALENESS: "the trainer (staleness limit)",
            RUNNING: "scores" if self._dispatcher.scoring else "rollout.max_running_groups",
        }[self._admission.held_by]

    def _trainer_waits_for(self) -> str:
        if self._dispatcher.playing:
            return "generation"
        return "scores" if self._dispatcher.scoring else "the next batch"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
