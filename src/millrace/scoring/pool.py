"""All scorers of a run: built from [[scorers]] tables and Python functions, and run on groups.

    score (scorers, length penalties) ─▶ select ─▶ estimate advantages ─▶ filter

A new built-in type is one module with a dataclass (see scorer_type.py) and one line in
SCORER_TYPES. A user's own type needs no registration: `type = "module:Name"` names a class. If the
class has the methods of a ScorerType, it is one; otherwise it is a reward function.

Promise: a scorer that raises, or returns something that is no score, fails only the group at hand,
with a ScoreError that is counted by scorer. Reward functions run in processes of their own, where
they may also hang or crash. A user's own type runs on the controller's event loop, so it must not
block.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import ScorerConfig
from millrace.core.errors import ConfigError, ScoreError, run_all, user_code
from millrace.core.files import check_file_name
from millrace.core.plugins import build_plugin
from millrace.core.protocols import (
    Advantages,
    AdvantagesOverBatch,
    Scorer,
    StartableScorer,
    VersionSubscriber,
    gives_scores,
)
from millrace.core.records import Episode, Group, Rollout, Score, ScorerResult, Task, TokenScores
from millrace.core.spans import ScorerLoad
from millrace.scoring.advantages import estimate_by_agent, with_advantages
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.functions.user_function import ship_functions
from millrace.scoring.functions.workers import ScorerWorkers
from millrace.scoring.reward_models.reward_model import ProcessRewardModel, RewardModel
from millrace.scoring.scheduling.group_scoring import GroupScoring
from millrace.scoring.scheduling.scorer_queue import (
    GroupRef,
    ScoreGate,
    ScorerQueue,
    check_gates,
    parse_gate,
)
from millrace.scoring.scorer_type import RunInfo, ScorerContext, ScorerType
from millrace.scoring.services.endpoint import Http
from millrace.scoring.services.judge import Judge
from millrace.scoring.shaping import Shaping
from millrace.scoring.teachers.teacher import Reference, SelfTeacher, Teacher
from millrace.scoring.verifiers import VERIFIERS

SCORER_TYPES: dict[str, type] = {
    "http": Http,
    "judge": Judge,
    "reward_model": RewardModel,
    "process_reward_model": ProcessRewardModel,
    "teacher": Teacher,
    "self_teacher": SelfTeacher,
    "reference": Reference,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """One scorer of a run: its type, and the settings that all scorers have."""

    type: ScorerType
    name: str
    weight: float = 1.0
    gate: ScoreGate | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of CallSettings

    @property
    def may_reward_tokens(self) -> bool:
        """True if the scorer may return token rewards. A user's own type always may."""
        known = (Function, *SCORER_TYPES.values(), *VERIFIERS.values())
        return isinstance(self.type, ProcessRewardModel) or not isinstance(self.type, known)


def resolve_scorers(rows: Sequence[ScorerConfig]) -> list[ScorerSpec]:
    return [resolve_scorer(row, section=f"scorers.{i}") for i, row in enumerate(rows)]


def resolve_scorer(row: ScorerConfig, *, section: str) -> ScorerSpec:
    if row.function is not None:
        scorer_type: ScorerType = Function(function=row.function)
    else:
        types = {**VERIFIERS, **SCORER_TYPES}
        built = build_plugin(row.type_settings, builtins=types, default="", section=section)
        scorer_type = built if isinstance(built, ScorerType) else Function(function=built)
    return ScorerSpec(
        type=scorer_type,
        name=row.name or scorer_type.default_name,
        weight=row.weight,
        gate=None if row.when is None else parse_gate(row.when, section=section),
        overrides=row.call_settings,
    )


def function_scorer(function: str | Callable[..., Any], *, name: str | None = None) -> ScorerSpec:
    """The scorer for a reward function that is passed to train() or named on the command line."""
    scorer_type = Function(function=function)
    return ScorerSpec(type=scorer_type, name=name or scorer_type.default_name)


def check_scorers(
    specs: Sequence[ScorerSpec], tasks: Sequence[Task], *, may_be_empty: bool = False
) -> None:
    """Raise ConfigError for mistakes. `may_be_empty`: the environment gives the rewards."""
    names = [spec.name for spec in specs]
    if not names and not may_be_empty:
        raise ConfigError(
            "The run has no scorer; add a [[scorers]] table, or pass scorers=[...] to train()."
        )
    for name in names:
        check_file_name(name, of="A scorer")
        if names.count(name) > 1:
            raise ConfigError(f"Two scorers are named {name!r}; give each a different name.")
    check_gates({spec.name: spec.gate for spec in specs})
    for spec in specs:
        spec.type.check(tasks, name=spec.name)


ENVIRONMENT = "environment"  # name of the score part that an environment gives


@dataclass(eq=False)
class ScorerPool:
    """The scorers of a run and their processes. Used on the controller's event loop."""

    queues: InitVar[Sequence[ScorerQueue]]
    _: KW_ONLY
    advantages: Advantages
    workers: ScorerWorkers
    functions: Mapping[str, str]  # where workers load them by name, see ship_functions()
    shaping: Shaping

    def __post_init__(self, queues: Sequence[ScorerQueue]) -> None:
        self.scorers: tuple[Scorer, ...] = tuple(queue.scorer for queue in queues)
        self._startable = [s for s in self.scorers if isinstance(s, StartableScorer)]
        self._queues = {queue.scorer.name: queue for queue in queues}
        self._orders = itertools.count()
        name = getattr(self.advantages, "__qualname__", type(self.advantages).__name__)
        self._estimator_name = f"Advantages {name!r}"
        self.tokens_wasted: Counter[str] = Counter()  # sampled but never trained, by reason

    async def start(self) -> None:
        """Raises the first error."""
        await run_all(
            [self.workers.start(self.functions), *(each.start() for each in self._startable)]
        )

    async def close(self) -> None:
        """Also called after a failed start()."""
        await asyncio.gather(*(queue.close() for queue in self._queues.values()))
        await asyncio.gather(self.workers.close(), *(s.close() for s in self._startable))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def open(
        self, *, number: int, task: Task, queues: Mapping[str, ScorerQueue] | None = None
    ) -> GroupScoring:
        """Open the scoring of a group whose episodes finish one by one, for a `with` block.
        `queues`: some of the scorers'; None = all."""
        group = GroupRef(order=next(self._orders), number=number, task=task)
        return GroupScoring(self._queues if queues is None else queues, group=group)

    async def score(self, group: Group, scoring: GroupScoring | None = None) -> Group:
        """Return the group with scores; raises ScoreError if a scorer fails on it. `scoring` is the
        result of open(), if episodes were added before the group was complete."""
        if scoring is None:
            with self.open(number=group.number, task=group.task) as scoring:
                return await self.score(group, scoring)
        group = combine(group, await scoring.results(group), scorers=scoring.scorers)
        if not self.shaping.penalties:
            return group
        return await asyncio.to_thread(self.shaping.penalize, group)

    async def evaluate(self, group: Group) -> Group:
        """Score a group without the scorers that return only token scores."""
        queues = {name: q for name, q in self._queues.items() if gives_scores(q.scorer)}
        with self.open(number=group.number, task=group.task, queues=queues) as scoring:
            return await self.score(group, scoring)

    async def shape(self, group: Group) -> Group:
        """Return the part of a scored group to train, with advantages; raises Filtered."""
        wasted: Counter[str] = Counter()
        try:
            # In a thread: selection, advantages and filters may be slow user code.
            return await asyncio.to_thread(self._shape, group, wasted)
        finally:
            self.tokens_wasted.update(wasted)

    def with_batch_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of one step with advantages that compare them. Called in a thread."""
        if not isinstance(self.advantages, AdvantagesOverBatch):
            return list(groups)
        with user_code(self._estimator_name):
            found = self.advantages.over_batch(groups)
        return [with_advantages(group, own) for group, own in zip(groups, found, strict=True)]

    @property
    def version_subscribers(self) -> tuple[VersionSubscriber, ...]:
        return tuple(scorer for scorer in self.scorers if isinstance(scorer, VersionSubscriber))

    def loads(self) -> dict[str, ScorerLoad]:
        return {name: queue.load() for name, queue in self._queues.items()}

    def _shape(self, group: Group, wasted: Counter[str]) -> Group:
        selected = self.shaping.select(group, wasted=wasted)
        with user_code(self._estimator_name):
            found = estimate_by_agent(self.advantages, selected)
        return self.shaping.filters(with_advantages(selected, found), wasted=wasted)


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
    run: RunInfo | None = None,
) -> ScorerPool:
    """Build a pool that is not started yet; raises ConfigError. `worker_pool` starts and supervises
    processes. `private` is a directory for pickled functions that must exist as long as the pool.
    `folder` belongs to the run directory. Without scorers, the environment gives the rewards."""
    check_scorers(specs, tasks=(), may_be_empty=True)
    workers = ScorerWorkers(worker_pool, num_workers=num_workers, start_timeout_s=start_timeout_s)
    context = ScorerContext(
        workers=workers,
        worker_pool=worker_pool,
        folder=folder,
        start_timeout_s=start_timeout_s,
        run=run,
        warn=warn,
    )
    queues: list[ScorerQueue] = []
    for spec in specs:
        calls = replace(spec.type.call_settings(num_workers=num_workers), **spec.overrides)
        scorer = spec.type.build(name=spec.name, weight=spec.weight, calls=calls, context=context)
        queues.append(ScorerQueue(scorer, calls=calls, gate=spec.gate, warn=warn))
    _check_gates_have_scores(queues)
    return ScorerPool(
        queues,
        advantages=advantages,
        workers=workers,
        functions=ship_functions(context.functions, folder=private),
        shaping=shaping or Shaping(),
    )


def _check_gates_have_scores(queues: Sequence[ScorerQueue]) -> None:
    """Raise ConfigError for a gate that no episode can pass."""
    silent = {queue.scorer.name for queue in queues if not gives_scores(queue.scorer)}
    for queue in queues:
        if queue.gate is not None and queue.gate.scorer in silent:
            raise ConfigError(
                f"Scorer {queue.scorer.name!r} waits for the score of {queue.gate.scorer!r}, which"
                " scores tokens alone; name another scorer in its `when`, or set `score` of a"
                " process_reward_model."
            )


def combine(
    group: Group, results: Sequence[Sequence[ScorerResult]], *, scorers: Sequence[Scorer]
) -> Group:
    """Return the group with scores, given one list of results per scorer. A score of None adds
    nothing. The reward of an environment is a part like any other."""
    scores: list[Score] = []
    episodes: list[Episode] = []
    for index, (episode, *own_results) in enumerate(zip(group.episodes, *results, strict=True)):
        pairs = list(zip(scorers, own_results, strict=True))
        weighted = [
            scorer.weight * result.score for scorer, result in pairs if result.score is not None
        ]
        rewards: dict[str, float] = {}  # of the environment, by agent; "" stands for all agents
        if episode.reward is not None:
            given = episode.reward
            rewards = given if isinstance(given, dict) else {"": given}
        if not weighted and not rewards and not any(result.token_scores for _, result in pairs):
            names = ", ".join([*(scorer.name for scorer in scorers), "its environment"])
            raise ScoreError(
                f"No scorer applied to episode {index} of group {group.number}: all of {names}"
                " returned None; at least one must return a number."
            )
        shared = math.fsum(weighted)
        by_agent = {agent: reward + shared for agent, reward in rewards.items()}
        parts: dict[str, float | None] = {
            f"{ENVIRONMENT}.{agent}" if agent else ENVIRONMENT: reward
            for agent, reward in rewards.items()
        }
        parts |= {scorer.name: result.score for scorer, result in pairs if gives_scores(scorer)}
        scores.append(
            Score(
                total=float(np.mean([*by_agent.values()])) if rewards else shared,
                parts=parts,
                by_agent=by_agent if isinstance(episode.reward, dict) else {},
            )
        )
        for scorer, result in pairs:
            if result.token_scores:
                rollouts = zip(episode.rollouts, result.token_scores, strict=True)
                annotated = tuple(_annotated(r, scores, scorer) for r, scores in rollouts)
                episode = replace(episode, rollouts=annotated)
        episodes.append(episode)
    return replace(group, episodes=tuple(episodes), scores=tuple(scores))


def _annotated(rollout: Rollout, scores: TokenScores, scorer: Scorer) -> Rollout:
    """Rewards of several scorers add up. Reference and teacher logprobs come from one scorer."""
    changes: dict[str, object] = {}
    if scores.rewards is not None:
        weighted = (scorer.weight * scores.rewards).astype(np.float32)
        changes["rewards"] = weighted if rollout.rewards is None else rollout.rewards + weighted
    for name in ("reference_logprobs", "teacher"):
        if (value := getattr(scores, name)) is None:
            continue
        if getattr(rollout, name) is not None:
            raise ScoreError(
                f"Scorer {scorer.name!r} returns {name}, but an earlier scorer returned it, too;"
                " keep one of the two."
            )
        changes[name] = value
    return replace(rollout, **changes)
