"""The scoring tier as the controller sees it: a group in, what is worth training of it out, with
scores and advantages.

    judge (reward functions, length penalties) ─▶ select ─▶ estimate advantages ─▶ filter

Promise: users' code never runs on the controller's event loop. A scorer that raises, hangs, crashes
or returns what is no score costs the group at hand: a ScoreError, counted by scorer.
"""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from millrace.cluster.supervision.pool import WorkerPool
from millrace.core.errors import ScoreError
from millrace.core.protocols import (
    Advantages,
    AdvantagesOverBatch,
    Follower,
    Scorer,
    Service,
    gives_scores,
)
from millrace.core.records import Group, Task
from millrace.core.spans import ScorerLoad
from millrace.scoring.advantages.by_agent import by_agent
from millrace.scoring.advantages.estimators import with_advantages
from millrace.scoring.functions.handover import hand_over
from millrace.scoring.functions.workers import ScorerWorkers
from millrace.scoring.registry import ScorerSpec, check_specs
from millrace.scoring.scheduling.group_scoring import GroupScoring, ScorerStation
from millrace.scoring.scheduling.scorer_queue import ScorerQueue, ScoreTicket
from millrace.scoring.scorer_kind import RunFacts, ScorerTools
from millrace.scoring.shaping.combine import combine
from millrace.scoring.shaping.shaping import Shaping


class ScorerPool:
    """All scorers of a run and the processes behind them. Used on the controller's event loop."""

    def __init__(
        self,
        stations: Sequence[ScorerStation],
        *,
        advantages: Advantages,
        workers: ScorerWorkers,
        functions: Mapping[str, str],
        shaping: Shaping,
    ) -> None:
        """`functions`: for the workers, see handover.py."""
        self.scorers: tuple[Scorer, ...] = tuple(station.desk.scorer for station in stations)
        self._stations = {station.desk.scorer.name: station for station in stations}
        self._orders = itertools.count()
        self._advantages = advantages
        self._workers = workers
        self._functions = functions
        self._shaping = shaping
        self.tokens_wasted: Counter[str] = Counter()  # sampled and not trained, by reason

    async def start(self) -> None:
        services = [scorer for scorer in self.scorers if isinstance(scorer, Service)]
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._workers.start(self._functions))
            for service in services:
                starting.create_task(service.start())

    async def close(self) -> None:
        """Also after a start that failed."""
        services = [scorer for scorer in self.scorers if isinstance(scorer, Service)]
        await asyncio.gather(*(station.desk.close() for station in self._stations.values()))
        await asyncio.gather(self._workers.close(), *(service.close() for service in services))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(scorer.name for scorer in self.scorers)

    async def score(self, group: Group) -> Group:
        """What is to be trained of a group; raises Filtered if that is nothing, and ScoreError if a
        scorer fails on it."""
        return await self.shape(await self.judge(group))

    def open(self, *, number: int, task: Task) -> GroupScoring:
        """The scoring of a group whose episodes come one by one; to be closed."""
        ticket = ScoreTicket(order=next(self._orders), number=number, task=task)
        return GroupScoring(self._stations, ticket=ticket)

    async def judge(self, group: Group, scoring: GroupScoring | None = None) -> Group:
        """The group with scores; raises ScoreError if a scorer fails on it. `scoring`: what open()
        gave for it, if it was there before the group was complete."""
        if scoring is None:
            with self.open(number=group.number, task=group.task) as scoring:
                return await self.judge(group, scoring)
        group = combine(group, await scoring.verdicts(group), scorers=scoring.scorers)
        if not self._shaping.penalties:
            return group
        scores = await asyncio.to_thread(self._shaping.penalize, group, group.scores)
        return dataclasses.replace(group, scores=scores)

    async def examine(self, group: Group) -> Group:
        """As judge(), by those scorers alone that give scores."""
        stations = {
            name: station
            for name, station in self._stations.items()
            if gives_scores(station.desk.scorer)
        }
        ticket = ScoreTicket(order=next(self._orders), number=group.number, task=group.task)
        with GroupScoring(stations, ticket=ticket) as scoring:
            return await self.judge(group, scoring)

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Scorers to which the policy's versions are brought."""
        return tuple(scorer for scorer in self.scorers if isinstance(scorer, Follower))

    async def shape(self, group: Group) -> Group:
        """What is to be trained of a judged group, with advantages; raises Filtered if that is
        nothing."""
        wasted: Counter[str] = Counter()
        try:
            # In a thread, as all of these may be the user's own and take their time.
            return await asyncio.to_thread(self._shape, group, wasted)
        finally:
            self.tokens_wasted.update(wasted)

    def _shape(self, group: Group, wasted: Counter[str]) -> Group:
        selected = self._shaping.select(group, wasted=wasted)
        found = _estimate(by_agent(self._advantages), selected)
        estimated = with_advantages(selected, found)
        return self._shaping.filters(estimated, wasted=wasted)

    def in_batch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of one step, with the advantages they have among each other. Called in a
        thread."""
        if not isinstance(self._advantages, AdvantagesOverBatch):
            return list(groups)
        found = _estimate(self._advantages.over_batch, groups)
        return [with_advantages(group, mine) for group, mine in zip(groups, found, strict=True)]

    @property
    def workers_lost(self) -> int:
        """Processes that hung or crashed, and were replaced."""
        return self._workers.num_lost

    def loads(self) -> dict[str, ScorerLoad]:
        """By scorer."""
        return {name: station.desk.load() for name, station in self._stations.items()}


def build_scorer_pool(
    specs: Sequence[ScorerSpec],
    *,
    advantages: Advantages,
    num_workers: int,
    worker_pool: WorkerPool,
    private: Path,
    folder: Path,
    shaping: Shaping | None = None,
    start_timeout_s: float = 180.0,
    warn: Callable[[str], None] = print,
    may_be_none: bool = False,
    run: RunFacts | None = None,
) -> ScorerPool:
    """A pool, not yet started; raises ConfigError for what can be known to be wrong.

    `worker_pool` starts and supervises the processes. `private`, kept by the caller while the pool
    lives, takes the functions that no other process can import; `folder` is the run's own. There
    `may_be_none` where an environment rewards.
    """
    check_specs(specs, tasks=(), may_be_none=may_be_none)
    workers = ScorerWorkers(
        worker_pool,
        num_workers=num_workers,
        start_timeout_s=start_timeout_s,
    )
    tools = ScorerTools(
        workers=workers,
        worker_pool=worker_pool,
        folder=folder,
        start_timeout_s=start_timeout_s,
        run=run,
        warn=warn,
    )
    stations: list[ScorerStation] = []
    for spec in specs:
        rules = spec.rules(num_workers=num_workers)
        desk = ScorerQueue(spec.make(tools, rules=rules), rules=rules, warn=warn)
        stations.append(ScorerStation(desk=desk, gate=spec.gate))
    return ScorerPool(
        stations,
        advantages=advantages,
        workers=workers,
        functions=hand_over(tools.functions, folder=private),
        shaping=shaping or Shaping(),
    )


def _estimate(estimator: Callable[[Any], Any], scored: Any) -> Any:
    """What an estimator returns, unchecked; it may be the user's own, so it may raise anything."""
    try:
        return estimator(scored)
    except Exception as error:
        name = getattr(estimator, "__qualname__", type(estimator).__name__)
        raise ScoreError(
            f"Advantages {name!r} raised {type(error).__name__}: {error}; mend the function."
        ) from error
