"""The scoring tier as the controller sees it: a group in, what is worth training of it out, with
scores and advantages.

    judge (reward functions, length penalties) ─▶ select ─▶ estimate advantages ─▶ filter

Promise: users' code never runs on the controller's event loop. A scorer that raises, hangs, crashes
or returns what is no score costs the group at hand: a ScoreError, counted by scorer.
"""

import asyncio
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from millrace.cluster.worker import Worker
from millrace.core.errors import ScoreError
from millrace.core.protocols import Advantages, AdvantagesOverBatch, Scorer, Service
from millrace.core.records import Group, Verdict
from millrace.scoring.advantages import with_advantages
from millrace.scoring.combining import combine
from millrace.scoring.handover import hand_over
from millrace.scoring.registry import ScorerSpec, check_specs
from millrace.scoring.scorer_kind import ScorerTools
from millrace.scoring.shaping import Shaping
from millrace.scoring.workers import ScorerWorkers

SCORER_MODULE = "millrace.workers.scorer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringStats:
    """What the tier has done so far, and does now."""

    calls: dict[str, int]  # by scorer, as all of these
    failures: dict[str, int]
    seconds: dict[str, float]  # from call to result, with the wait for a free worker
    workers_busy: int
    workers_lost: int  # hung or crashed, and replaced
    calls_waiting: int  # for a free worker


class ScorerPool:
    """All scorers of a run and the processes behind them. Used on the controller's event loop."""

    def __init__(
        self,
        scorers: Sequence[Scorer],
        *,
        advantages: Advantages,
        workers: ScorerWorkers,
        functions: Mapping[str, str],
        shaping: Shaping,
    ) -> None:
        """`functions`: for the workers, see handover.py."""
        self.scorers = tuple(scorers)
        self._advantages = advantages
        self._workers = workers
        self._functions = functions
        self._shaping = shaping
        self.tokens_wasted: Counter[str] = Counter()  # sampled and not trained, by reason
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def start(self) -> None:
        services = [scorer for scorer in self.scorers if isinstance(scorer, Service)]
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._workers.start(self._functions))
            for service in services:
                starting.create_task(service.start())

    async def close(self) -> None:
        """Also after a start that failed."""
        services = [scorer for scorer in self.scorers if isinstance(scorer, Service)]
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

    async def judge(self, group: Group) -> Group:
        """The group with scores; raises ScoreError if a scorer fails on it."""
        # One failure does not stop the others: they are bounded in time, and each is counted.
        outcomes = await asyncio.gather(
            *(self._judge(scorer, group) for scorer in self.scorers), return_exceptions=True
        )
        columns: list[list[Verdict]] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            columns.append(outcome)
        group = combine(group, columns, scorers=self.scorers)
        if not self._shaping.penalties:
            return group
        scores = await asyncio.to_thread(self._shaping.penalize, group, group.scores)
        return dataclasses.replace(group, scores=scores)

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
        estimated = with_advantages(selected, _estimate(self._advantages, selected))
        return self._shaping.filters(estimated, wasted=wasted)

    def in_batch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of one step, with the advantages they have among each other. Called in a
        thread."""
        if not isinstance(self._advantages, AdvantagesOverBatch):
            return list(groups)
        found = _estimate(self._advantages.over_batch, groups)
        return [with_advantages(group, mine) for group, mine in zip(groups, found, strict=True)]

    def stats(self) -> ScoringStats:
        return ScoringStats(
            calls=dict(self._calls),
            failures=dict(self._failures),
            seconds=dict(self._seconds),
            workers_busy=self._workers.num_busy,
            workers_lost=self._workers.num_lost,
            calls_waiting=self._workers.num_waiting,
        )

    async def _judge(self, scorer: Scorer, group: Group) -> list[Verdict]:
        start_s = time.monotonic()
        self._calls[scorer.name] += 1
        try:
            return await scorer.score(group)
        except ScoreError:
            self._failures[scorer.name] += 1
            raise
        finally:
            self._seconds[scorer.name] += time.monotonic() - start_s


def build_scorer_pool(
    specs: Sequence[ScorerSpec],
    *,
    advantages: Advantages,
    num_workers: int,
    launch: Callable[[str, str], Awaitable[Worker]],
    private: Path,
    folder: Path,
    shaping: Shaping | None = None,
    start_timeout_s: float = 180.0,
) -> ScorerPool:
    """A pool, not yet started; raises ConfigError for what can be known to be wrong.

    `launch` starts a process by its name and module. `private`, kept by the caller while the pool
    lives, takes the functions that no other process can import; `folder` is the run's own.
    """
    check_specs(specs, tasks=())
    workers = ScorerWorkers(
        launch=lambda name: launch(name, SCORER_MODULE),
        num_workers=num_workers,
        start_timeout_s=start_timeout_s,
    )
    tools = ScorerTools(
        workers=workers, launch=launch, folder=folder, start_timeout_s=start_timeout_s
    )
    scorers = [spec.make(tools, rules=spec.rules(num_workers=num_workers)) for spec in specs]
    return ScorerPool(
        scorers,
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
