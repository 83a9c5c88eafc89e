"""The scoring tier as the controller sees it: a group in, what is worth training of it out, with
scores and advantages.

    judge (reward functions, length penalties) ─▶ select ─▶ estimate advantages ─▶ filter

Promise: users' code never runs on the controller's event loop. A scorer that raises, hangs, crashes
or returns what is no score costs the group at hand: a ScoreError, counted by scorer.
"""

import asyncio
import dataclasses
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.protocols import Advantages, AdvantagesOverBatch, Scorer
from millrace.core.records import Group, Verdict
from millrace.scoring.advantages import with_advantages
from millrace.scoring.agents import by_agent
from millrace.scoring.combining import combine
from millrace.scoring.function_scorer import FunctionScorer
from millrace.scoring.functions import RewardFunction, inspect_reward
from millrace.scoring.handover import hand_over, resolve_function
from millrace.scoring.shaping import Shaping
from millrace.scoring.workers import Launch, ScorerWorkers


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """One scorer as the user gave it; the fields are those of [[scorer]]."""

    function: str | Callable[..., Any]
    name: str | None = None
    weight: float = 1.0
    timeout_s: float = 30.0


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
        shaping: Shaping,
    ) -> None:
        self.scorers = tuple(scorers)
        self._advantages = advantages
        self._workers = workers
        self._shaping = shaping
        self.tokens_wasted: Counter[str] = Counter()  # sampled and not trained, by reason
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def start(self) -> None:
        await self._workers.start()

    async def close(self) -> None:
        await self._workers.close()

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
    launch: Launch,
    folder: Path,
    shaping: Shaping | None = None,
    start_timeout_s: float = 180.0,
    may_be_none: bool = False,
) -> ScorerPool:
    """A pool, not yet started; raises ConfigError for what can be known to be wrong.

    `launch` starts a scorer process by name. `folder`, private to the run and kept by the caller
    while the pool lives, takes the functions that no other process can import. There `may_be_none`
    where an environment rewards.
    """
    functions = inspect_scorers(specs, may_be_none=may_be_none)
    locations = hand_over(
        {f.name: spec.function for f, spec in zip(functions, specs, strict=True)}, folder=folder
    )
    workers = ScorerWorkers(
        launch=launch,
        num_workers=num_workers,
        functions=locations,
        start_timeout_s=start_timeout_s,
    )
    scorers = [
        FunctionScorer(function, weight=spec.weight, timeout_s=spec.timeout_s, workers=workers)
        for function, spec in zip(functions, specs, strict=True)
    ]
    return ScorerPool(scorers, advantages=advantages, workers=workers, shaping=shaping or Shaping())


def inspect_scorers(
    specs: Sequence[ScorerSpec], *, may_be_none: bool = False
) -> list[RewardFunction]:
    """What the scorers are, before any process starts; raises ConfigError for what is wrong."""
    functions = [_inspected(spec) for spec in specs]
    names = [function.name for function in functions]
    if not names and not may_be_none:
        raise ConfigError(
            "There is no scorer; add a [[scorer]] table, or pass scorers=[...] to train()."
        )
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two scorers are named {name!r}; give each a name of its own.")
    return functions


def _inspected(spec: ScorerSpec) -> RewardFunction:
    function = resolve_function(spec.function)
    name = spec.name or getattr(function, "__name__", type(function).__name__).strip("<>")
    if not math.isfinite(spec.weight):
        raise ConfigError(f"Scorer {name!r} has the weight {spec.weight}; give it a finite number.")
    if not spec.timeout_s > 0:
        raise ConfigError(f"Scorer {name!r} has timeout_s = {spec.timeout_s}; it must be above 0.")
    return inspect_reward(function, name=name)


def _estimate(estimator: Callable[[Any], Any], scored: Any) -> Any:
    """What an estimator returns, unchecked; it may be the user's own, so it may raise anything."""
    try:
        return estimator(scored)
    except Exception as error:
        name = getattr(estimator, "__qualname__", type(estimator).__name__)
        raise ScoreError(
            f"Advantages {name!r} raised {type(error).__name__}: {error}; mend the function."
        ) from error
