"""A run on a virtual clock: simulated engines, scorers and trainer under the project's own control.

    tasks ─▶ generate* ─▶ score* ─▶ buffer ─▶ train* ─▶ publish* ─┐       * simulated
      ▲                                                          │
      └──────────────────── swap* ◀──────────────────────────────┘

Promise: Dispatcher, GroupTracker, Admission, SyncBarrier, Buffer and VersionBroadcaster are those
of a real run; no rule about staleness is written a second time. A simulation is deterministic for
its seed. It runs on an event loop of its own.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from millrace.config import JournalConfig, RunConfig
from millrace.core.errors import Filtered
from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task, WeightUpdate
from millrace.core.spans import Span
from millrace.core.staleness import TokenVersions
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.journal import NoJournal
from millrace.plan.lengths import Lengths
from millrace.plan.model_costs import Costs
from millrace.plan.workers import SimulatedEngine, SimulatedHost, SpeedOf, VirtualClock
from millrace.run.build import build_dispatcher
from millrace.tasks.streams import TaskStream
from millrace.weights.broadcaster import VersionBroadcaster

_STAMPS = 64  # of a mean completion: each stands for several tokens if it is longer


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Rates, busy shares and mean staleness are those of the steps after the first few; what is
    wasted or lost is that of the whole simulated run."""

    samples_per_s: float
    tokens_per_s: float  # sampled, wasted ones included
    step_s: float
    staleness_mean: float
    staleness_max: int
    engine_busy: float
    trainer_busy: float
    tokens_wasted_share: float
    ends_s: Sequence[float] = field(repr=False)  # of all simulated steps
    issued_groups: int
    open_groups: int  # running or waiting at the end
    lost_groups: dict[str, int]  # for good, by reason
    spans: Sequence[Span] = field(repr=False)


class _SimulatedStep(NamedTuple):
    """Totals when a step ended, and the staleness of what it trained."""

    end_s: float = 0.0
    tokens: float = 0.0  # sampled
    busy_s: Mapping[str, float] = {}  # by worker
    mean_staleness: float = 0.0
    most: int = 0  # staleness


class _NumberedTasks(TaskStream):
    def task(self, number: int) -> Task:
        return Task(prompt="")


class _Simulation:
    """Stands in for the player, the engine pool, the scorers and the trainer of a Dispatcher."""

    def __init__(
        self, config: RunConfig, costs: Costs, lengths: Lengths, speed_of: SpeedOf | None
    ) -> None:
        self.config, self.costs, self.lengths = config, costs, lengths
        self.host = SimulatedHost(speed_of)
        self.unit = max(1.0, lengths.mean / lengths.mean_turns / _STAMPS)  # tokens of a stamp
        parts: dict[str, Any] = {"costs": costs, "host": self.host, "unit": self.unit}
        count = max(1, config.engine.num_local + config.engine.remote)
        self.engines = [
            SimulatedEngine(f"engine-{i}", config=config, **parts) for i in range(count)
        ]
        self._rng = np.random.default_rng(config.seed)
        self._scorers = asyncio.Semaphore(config.scoring.workers)
        self._version = 0
        self.steps: list[_SimulatedStep] = []
        self.dispatcher = build_dispatcher(self._run_parts())
        # Engines that pause are told before they receive a version, others see it afterwards.
        self._announce_s = 0.0 if config.weights.interrupt == "save" else costs.publish_s
        self.broadcaster = VersionBroadcaster(version=0)
        self.broadcaster.subscribe(self._swap, on_version=self.dispatcher.admission.advance)

    def _run_parts(self) -> Any:
        """The fields of RunParts that a dispatcher needs."""
        monitor = SimpleNamespace(warn=lambda _: None, now=asyncio.get_running_loop().time)
        return SimpleNamespace(
            config=self.config.model_copy(update={"journal": JournalConfig(max_bytes=0)}),
            cursor=SimpleNamespace(version=0, next_number=0, unfinished=()),
            versions={},
            journal=NoJournal(),
            monitor=monitor,
            tasks=_NumberedTasks(),
            others=(),
            is_synchronous=self.config.weights.interrupt == "barrier",
            **dict.fromkeys(("player", "scorers", "engines"), self),
        )

    def together(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def run(self, steps: int) -> None:
        source: Any = self
        async with asyncio.TaskGroup() as tasks:
            background = [
                *(tasks.create_task(engine.run()) for engine in self.engines),
                tasks.create_task(self.dispatcher.run()),
                tasks.create_task(self.broadcaster.run(source)),
            ]
            await self._train(steps, tasks)
            self.host.close()
            for task in background:
                task.cancel()

    async def _train(self, steps: int, tasks: asyncio.TaskGroup) -> None:
        """The order of Controller._train: the next batch is taken while one is trained."""
        loop, barrier = asyncio.get_running_loop(), self.dispatcher.barrier
        take, num_groups = self.dispatcher.buffer.take, self.config.trainer.groups_per_step
        upcoming = tasks.create_task(take(num_groups, version=0))
        while self._version < steps:
            self.host.enter("trainer", "a batch", busy=False)
            if barrier is not None:
                barrier.open()
            groups = await upcoming
            if barrier is not None:
                barrier.close()
            if self._version + 1 < steps:
                tasks.create_task(self.dispatcher.expire(self._version + 1))
                upcoming = tasks.create_task(take(num_groups, version=self._version + 1))
            token_versions = TokenVersions.joined(TokenVersions.of_group(group) for group in groups)
            await self.host.work("trainer", "step", self.costs.train_s(*_work(groups)))
            mean = token_versions.total_staleness(self._version) / token_versions.num_tokens
            most = self._version - min(token_versions.counts)
            self._version += 1
            tokens = sum(engine.sampled for engine in self.engines)
            busy_s = self.host.busy_until_now()
            self.steps.append(_SimulatedStep(loop.time(), tokens, busy_s, mean, most))
            self.dispatcher.tracker.trained(group.number for group in groups)
            empty: dict[str, Any] = {"tensors": (), "num_bytes": 0, "checksum": 0, "location": ""}
            update = WeightUpdate(version=self._version, transport="shm", **empty)
            loop.call_later(self._announce_s, self.broadcaster.publish, update)

    async def _swap(self, update: WeightUpdate) -> int:
        await asyncio.gather(*(engine.swap(update.version) for engine in self.engines))
        return update.version

    async def release(self, update: WeightUpdate) -> None:
        """There are no bytes to release."""

    async def expire(self, oldest: int, adapters: object = None) -> None:
        for engine in self.engines:
            engine.expire(oldest)

    async def play_for_training(
        self, task: Task, *, attempt: Attempt, group_size: int, scoring: object
    ) -> Group:
        """The first `group_size` episodes that finish; an expired one ends its group."""
        drawn = self.lengths.draw(self._rng, group_size + self.config.rollout.num_cancelled)
        engine, prompt = self._least_loaded, self.lengths.prompt_tokens
        first = [  # queued at once, so that the next group sees the load
            engine.add(prompt=prompt, tokens=int(lengths[0]), prefill=0.0 if index else prompt)
            for index, lengths in enumerate(drawn)
        ]
        plays = [
            asyncio.ensure_future(self._episode(attempt, lengths, engine, sequence))
            for lengths, sequence in zip(drawn, first, strict=True)
        ]
        try:
            ended = asyncio.as_completed(plays)
            rollouts = [await next(ended) for _ in range(group_size)]
        finally:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
            for sequence in first:  # of episodes that were cancelled before they began
                engine.remove(sequence)
        episodes = tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts)
        scores = tuple(Score(total=0.0, parts={}) for _ in episodes)
        return Group(number=attempt.number, task=task, episodes=episodes, scores=scores)

    @property
    def _least_loaded(self) -> SimulatedEngine:
        return min(self.engines, key=lambda engine: engine.load)

    async def _episode(
        self, attempt: Attempt, lengths: np.ndarray, engine: SimulatedEngine, sequence: Any
    ) -> Rollout:
        prompt, parts = self.lengths.prompt_tokens, list[np.ndarray]()
        for turn, tokens in enumerate(lengths.tolist()):
            if turn:
                await asyncio.sleep(self.lengths.tool_s)
                engine = self._least_loaded
                sequence = engine.add(prompt=prompt, tokens=tokens, prefill=0.0)
            parts.append(await engine.finish(sequence))
            attempt.token_versions = TokenVersions.joined(
                [attempt.token_versions, TokenVersions.of(parts[-1])]
            )
            attempt.finished.append(tokens)
            prompt += tokens
        versions = np.concatenate(parts)
        return Rollout(
            tokens=np.array([self.lengths.prompt_tokens, lengths.sum()]),  # lengths, for _work()
            mask=np.ones(len(versions), bool),
            engine_logprobs=np.zeros(0, np.float32),
            versions=versions,
            sampling=Sampling(),
        )

    def open(self, *, number: int, task: Task) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def score(self, group: Group, scoring: object) -> Group:
        async with self._scorers:
            await asyncio.sleep(self.costs.score_s)
        return group

    async def shape(self, group: Group) -> Group:
        if self._rng.random() < self.lengths.filtered_share:
            raise Filtered("filtered")
        return replace(group, episodes=group.episodes[: self.config.rollout.group_size])


def _work(groups: Sequence[Group]) -> tuple[float, float]:
    """Tokens and attended pairs of a step; the prompt of a group is computed once."""
    tokens = pairs = 0.0
    for group in groups:
        lengths = np.array([rollout.tokens for rollout in group.rollouts], dtype=float)
        prompt, own = lengths[0, 0], lengths[:, 1]
        tokens += prompt + own.sum()
        pairs += prompt**2 / 2 + (own * (prompt + own / 2)).sum()
    return tokens, pairs


def simulate(
    config: RunConfig,
    costs: Costs,
    lengths: Lengths,
    *,
    speed_of: SpeedOf | None = None,
    steps: int | None = None,
    warm_up: int | None = None,
) -> Prediction:
    """`warm_up` steps at the start are left out of the means."""
    warm_up = min(config.buffer.max_staleness, 8) + 2 if warm_up is None else warm_up
    steps = steps or warm_up + 8

    async def run() -> Prediction:
        simulation = _Simulation(config, costs, lengths, speed_of)
        await simulation.run(steps)
        return _prediction(simulation, warm_up)

    with asyncio.Runner(loop_factory=VirtualClock().new_loop) as runner:
        return runner.run(run())


def _prediction(run: _Simulation, warm_up: int) -> Prediction:
    counted, end = run.steps[warm_up:], run.steps[-1]
    begin = run.steps[warm_up - 1] if warm_up else _SimulatedStep()
    seconds, tracker = end.end_s - begin.end_s, run.dispatcher.tracker
    busy = {
        worker: (busy_s - begin.busy_s.get(worker, 0.0)) / seconds
        for worker, busy_s in end.busy_s.items()
    }
    wasted = sum(tracker.waste.tokens.values()) * run.unit / end.tokens
    open_numbers: Any = tracker.cursor()["unfinished"]
    samples = run.config.trainer.groups_per_step * run.config.rollout.group_size * len(counted)
    return Prediction(
        samples_per_s=float(samples / seconds),
        tokens_per_s=float((end.tokens - begin.tokens) / seconds),
        step_s=float(seconds / len(counted)),
        staleness_mean=fmean(step.mean_staleness for step in counted),
        staleness_max=max(step.most for step in run.steps),
        engine_busy=fmean(float(busy[engine.name]) for engine in run.engines),
        trainer_busy=float(busy["trainer"]),
        tokens_wasted_share=float(min(1.0, wasted)),
        ends_s=[step.end_s for step in run.steps],
        issued_groups=tracker.next_number,
        open_groups=len(open_numbers),
        lost_groups=dict(tracker.dropped),
        spans=run.host.spans,
    )
