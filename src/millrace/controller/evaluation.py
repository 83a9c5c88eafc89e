"""Evaluation on held-out tasks: accuracy, mean@k, pass@k and the policy versions that sampled.

A run evaluates before the first step, every few steps, and after the last.

Promise: training waits for no evaluation, except with the synchronous barrier. Engines and scorers
are of the same kind as in training. Runs on the controller's event loop.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.cluster.supervision.watchdog import StallWatchdog
from millrace.config import RunConfig
from millrace.core.errors import ScoreError, TaskError
from millrace.core.records import Group, Task, WeightUpdate
from millrace.environments.rollouts.player import Player
from millrace.inference.pool import EnginePool
from millrace.monitoring.monitor import RunMonitor
from millrace.scoring.pool import ScorerPool
from millrace.weights.broadcaster import Receive

SCORE_TIMEOUT_S = 600.0  # without any score; tasks that still wait then count as unscored


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    step: int  # after which it was due
    accuracy: float  # mean@samples: the share of solved episodes; a failed one is not solved
    num_tasks: int
    num_failed: int  # tasks
    num_unscored: int = 0  # of these: their scorers did not answer
    samples: int  # episodes per task
    solved_at: float = 1.0  # score of a solved episode
    pass_at: dict[int, float]  # by k: the chance that one of k episodes solves its task
    versions: dict[int, int]  # tokens by the version that sampled them
    groups: tuple[Group, ...]  # in task order; failed ones left out

    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"eval/accuracy": self.accuracy, "eval/step": self.step}
        if self.samples > 1:
            metrics[f"eval/mean@{self.samples}"] = self.accuracy
            metrics |= {f"eval/pass@{k}": share for k, share in self.pass_at.items()}
        if self.versions:
            metrics["eval/version_min"] = min(self.versions)
            metrics["eval/version_max"] = max(self.versions)
        if self.num_unscored:
            metrics["eval/unscored"] = self.num_unscored
        return metrics


@dataclass(kw_only=True, slots=True)
class EvalProgress:
    step: int
    num_tasks: int
    num_played: int = 0
    num_scored: int = 0  # or failed

    def __str__(self) -> str:
        return (
            f"the evaluation of step {self.step} has generated {self.num_played} of"
            f" {self.num_tasks} tasks and scored {self.num_scored}."
        )


@dataclass(eq=False)
class ScoreDeadline:
    """Waits for scores as long as some arrive; `timeout_s` after the last one, all waits end."""

    timeout_s: float
    num_timed_out: int = 0
    _scored_s: float = -math.inf  # monotonic
    _is_over: bool = False

    async def wait(self, scoring: Coroutine[Any, Any, Group]) -> Group | None:
        """Returns None if no score arrived in time."""
        began_s, task = time.monotonic(), asyncio.create_task(scoring)
        try:
            while not task.done() and not self._is_over:
                left_s = max(began_s, self._scored_s) + self.timeout_s - time.monotonic()
                self._is_over = left_s <= 0
                await asyncio.wait({task}, timeout=max(left_s, 0))
            if not task.done():
                self.num_timed_out += 1
                return None
            self._scored_s = time.monotonic()
            return task.result()
        finally:
            task.cancel()


async def evaluate(
    tasks: Sequence[Task],
    *,
    samples: int,
    progress: EvalProgress,
    play: Callable[[Task, int], Awaitable[Group]],
    score: Callable[[Group], Coroutine[Any, Any, Group]],
    solved_at: float,
    max_running: int,
    score_timeout_s: float = SCORE_TIMEOUT_S,
) -> Evaluation:
    """Generate `samples` episodes of each task and count those with a score of `solved_at`."""
    room, deadline = asyncio.Semaphore(max_running), ScoreDeadline(score_timeout_s)

    async def one(number: int, task: Task) -> Group | None:
        async with room:
            try:
                group = await play(task, number)
                progress.num_played += 1
                return await deadline.wait(score(group))
            except (TaskError, ScoreError):
                return None  # counted as failed below
            finally:
                progress.num_scored += 1

    groups = await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))
    played = [group for group in groups if group is not None]
    solved = [0] * (len(tasks) - len(played))
    solved += [sum(score.is_solved(solved_at) for score in group.scores) for group in played]
    return Evaluation(
        step=progress.step,
        accuracy=sum(solved) / (len(tasks) * samples),
        num_tasks=len(tasks),
        num_failed=len(tasks) - len(played),
        num_unscored=deadline.num_timed_out,
        samples=samples,
        solved_at=solved_at,
        pass_at={
            k: float(np.mean([pass_at(k, samples=samples, solved=count) for count in solved]))
            for k in sorted({2**power for power in range(samples.bit_length())} | {samples})
        },
        versions=_versions(played),
        groups=tuple(played),
    )


def pass_at(k: int, *, samples: int, solved: int) -> float:
    """The probability that k of `samples` episodes, of which `solved` are solved, include a solved
    one: 1 - C(samples - solved, k) / C(samples, k). This estimate of pass@k is unbiased."""
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def _versions(groups: Sequence[Group]) -> dict[int, int]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counts = Counter(v for rollout in rollouts for v in rollout.versions[rollout.mask].tolist())
    return dict(sorted(counts.items()))


@dataclass(kw_only=True, eq=False)
class EvalSet:
    """The held-out tasks of a run, and how they are played: engines, temperature, concurrency."""

    tasks: Sequence[Task]
    config: RunConfig
    player: Player
    engines: EnginePool
    scorers: ScorerPool
    monitor: RunMonitor

    def __post_init__(self) -> None:
        settings = self.config.evaluate
        self._running: list[EvalProgress] = []
        # Tasks whose samples the engines decode together.
        num_engines = settings.engines or self.config.engine.num_local + self.config.engine.remote
        num_sequences = num_engines * self.config.engine.max_sequences
        self._max_running = max(1, num_sequences // settings.samples)
        self._is_synchronous = self.config.weights.interrupt == "barrier"
        if self._is_synchronous:
            self._max_running = len(self.tasks)
        temperature = settings.temperature
        if temperature is None:
            temperature = 0.0 if settings.samples == 1 else self.config.sampling.temperature
        self._player = self.player.evaluating(engine=self.engines, temperature=temperature)
        if self.player.turns is not None and self.engines is not self.player.engine:
            turns = replace(self.player.turns, together=self.engines.together)
            self._player = replace(self._player, turns=turns)

    @property
    def progress(self) -> tuple[int, int] | None:
        """Tasks that are done and in total, during an evaluation."""
        if not self._running:
            return None
        return sum(p.num_scored for p in self._running), sum(p.num_tasks for p in self._running)

    async def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the version that the engines hold, and report it; None without tasks."""
        if not self.tasks:
            return None
        progress = EvalProgress(step=step, num_tasks=len(self.tasks))
        stalls = StallWatchdog(
            limit_s=math.inf,  # engines and scorers have their own limits
            what="No held-out task made progress",
            explain=lambda: str(progress),
            moved=lambda: progress.num_played + progress.num_scored,
            warn=self.monitor.warn,
        )
        self._running.append(progress)
        try:
            evaluation = await stalls.until(self._evaluate(progress))
        finally:
            self._running.remove(progress)
        if evaluation.num_unscored:
            self.monitor.warn(
                f"{evaluation.num_unscored} of {evaluation.num_tasks} held-out tasks have no score"
                " and count as not solved: their scorers did not answer for"
                f" {SCORE_TIMEOUT_S:g} s."
            )
        self.monitor.evaluated(evaluation.metrics())
        return evaluation

    async def _evaluate(self, progress: EvalProgress) -> Evaluation:
        samples, name = self.config.evaluate.samples, f"evaluation {progress.step}, task"
        playing = evaluate(
            self.tasks,
            samples=samples,
            progress=progress,
            play=lambda task, number: self._player.play_for_evaluation(
                task, number=number, group_size=samples, name=name
            ),
            score=self.scorers.evaluate,
            solved_at=self.config.evaluate.solved_at,
            max_running=self._max_running,
        )
        if not self._is_synchronous:
            return await playing
        async with self.engines.together():  # requests that are sent together start together
            task = asyncio.create_task(playing)
        return await task


# Called after a step; returns None without held-out tasks.
Evaluate = Callable[[int], Coroutine[Any, Any, Evaluation | None]]


@dataclass(kw_only=True, eq=False)
class EvalScheduler:
    evaluate: Evaluate
    every_steps: int
    steps: int
    version: int  # that the engines hold at first
    before: Evaluation | None = None  # of the version that the run started with
    after: Evaluation | None = None  # of the last version

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        """Called before anything is generated for training."""
        raise NotImplementedError

    async def after_step(self, version: int) -> None:
        """Called after each step but the last."""

    async def finish(self) -> None:
        """Returns when the last version, which all engines hold, is evaluated."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class SharedEvalScheduler(EvalScheduler):
    """Evaluates on the rollout engines, beside their other work, with the versions they hold."""

    # Waits until the engines hold a version. With it, after_step() waits for that and evaluates.
    reached: Callable[[int], Awaitable[None]] | None = None
    _activities: asyncio.TaskGroup | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._activities = activities
        self.before = await self.evaluate(self.version)

    async def after_step(self, version: int) -> None:
        if not self.every_steps or version % self.every_steps:
            return
        if self.reached is None:
            assert self._activities is not None, "begin() comes first"
            self._activities.create_task(self.evaluate(version))
        else:
            await self.reached(version)
            await self.evaluate(version)

    async def finish(self) -> None:
        self.after = await self.evaluate(self.steps)


@dataclass(kw_only=True, eq=False)
class PinnedEvalScheduler(EvalScheduler):
    """Evaluates on engines that do nothing else; a subscriber of the version broadcast.

    The engines receive a version only when an evaluation is due and the previous one is over, and
    they keep it until theirs is over. If evaluations fall due meanwhile, the next version published
    afterwards is evaluated instead. So the bytes of a version are not kept for the length of an
    evaluation, except those of the last version, which is always evaluated.
    """

    swap: Receive  # loads a version into the evaluation engines
    _idle: asyncio.Event = field(default_factory=asyncio.Event)  # set if there is nothing to do
    _loaded: asyncio.Queue[int] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    _running: asyncio.Task[None] | None = None

    async def begin(self, activities: asyncio.TaskGroup) -> None:
        self._running = activities.create_task(self._run(self.version))

    def wants(self, version: int) -> bool:
        """True for the last version, and if an evaluation is due and none is running."""
        every = self.every_steps
        is_due = every > 0 and version // every > self.version // every
        return version == self.steps or (is_due and self._idle.is_set())

    async def receive(self, update: WeightUpdate) -> int:
        """Returns when the engines hold this version or, if one of them was lost, a newer one."""
        await self._idle.wait()
        self._idle.clear()
        self.version = update.version  # wants() finds out what is due after it
        try:
            version = await self.swap(update)
        except BaseException:
            self._idle.set()
            raise
        self._loaded.put_nowait(version)
        return version

    async def finish(self) -> None:
        assert self._running is not None, "begin() comes first"
        await self._running

    async def _run(self, version: int) -> None:
        self.before = self.after = await self.evaluate(version)
        while version < self.steps:
            self._idle.set()
            version = await self._loaded.get()
            self.after = await self.evaluate(version)
