"""The scorer types "reward_model" and "process_reward_model": transformers classifiers.

A reward model scores whole conversations. A process reward model values the steps of an episode. A
step's reward belongs to its last token. The episode's score, if wanted, is computed from the values
of its steps. Scorers run on the controller's event loop.
"""

import asyncio
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from millrace.cluster.messages import StepReading
from millrace.config.section import PositiveInt
from millrace.core.errors import ScoreError
from millrace.core.plugins import plugin
from millrace.core.protocols import OnTokens
from millrace.core.records import Episode, Group, Request, Rollout, ScorerResult, Task, TokenScores
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.reward_models.process import Head, RewardModelProcess, RewardModelSettings
from millrace.scoring.reward_models.read_ahead import ReadAhead, StepReader
from millrace.scoring.reward_models.steps import Steps, build_steps, step_ends
from millrace.scoring.scorer_type import CallSettings, ScorerContext

Reduce = Literal["value", "difference"]
Aggregate = Literal["min", "mean", "last"]
AGGREGATES: dict[Aggregate, Callable[[list[float]], Any]] = {
    "min": min,
    "mean": np.mean,
    "last": operator.itemgetter(-1),
}


@plugin
class RewardModel(RewardModelSettings):
    default_name = "reward_model"

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "RewardModelScorer":
        settings, takes_ids = self.checked(scorer=name), self.template == "ids"
        if takes_ids:
            self.require_same_tokens(context.run_info.tokenizer, scorer=name)
        return RewardModelScorer(
            name=name,
            weight=weight,
            model=settings.make_process(name, context, head="sequence", is_whole=True),
            timeout_s=calls.timeout_s,
            takes_ids=takes_ids,
        )


@dataclass(kw_only=True, eq=False)
class RewardModelScorer(ModelScorer[RewardModelProcess]):
    timeout_s: float
    takes_ids: bool  # the policy's tokens, instead of text

    async def score(self, group: Group) -> list[ScorerResult]:
        readings = [self._reading(episode) for episode in group.episodes]
        values = await self.model.read(readings, timeout_s=self.timeout_s)
        _check_finite([value for (value,) in values], scorer=self.name, group=group)
        return [ScorerResult(score=value) for (value,) in values]

    def _reading(self, episode: Episode) -> StepReading:
        if self.takes_ids:
            tokens = episode.rollouts[-1].tokens
            return StepReading(tokens=tokens, ends=[len(tokens) - 1])
        turn = episode.turns[-1]
        return StepReading(prompt=turn.prompt, pieces=[turn.completion])


@plugin
class ProcessRewardModel(RewardModelSettings):
    """A model that values steps, in a process of its own. Unlike for reward models, template =
    "auto" means "ids" if the tokenizers are the same. With text, the steps are appended to the
    prompt one by one."""

    head: Head = "token"
    """ "token": a token-classification model, read at the last token of each step. "sequence": a
    sequence-classification model, applied to the text up to the end of each step."""
    steps: Mapping[str, Any] = field(default_factory=lambda: {"by": "delimiter"})
    """Definition of a step: {by = "delimiter", delimiter = "\\n\\n"}, {by = "turn"}, or
    {by = "entropy", threshold = 2.0} (or quantile = 0.9)."""
    reduce: Reduce = "value"
    """Reward of a step: its value, or the difference to the value of the step before."""
    score: Aggregate | None = None
    """Score of the episode: the minimum, the mean or the last of its step values. Default: none."""
    separator: str | None = None
    """Text inserted after each step, at which the model is read, for models trained that way."""
    pipelined: bool = True
    """Read steps while the rest of the sequence is still being generated."""
    ahead_tokens: PositiveInt = 32
    """Number of new tokens that trigger the next read of an unfinished sequence."""
    kept_tokens: PositiveInt = 65_536
    """Number of tokens whose KV a causal model keeps until the next step arrives."""

    default_name = "process_reward_model"

    def __post_init__(self) -> None:
        self.build_steps()

    def build_steps(self) -> Steps:
        return build_steps(self.steps, section="scorer.steps")

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "ProcessRewardScorer":
        settings, tokenizer = self.checked(scorer=name), context.run_info.tokenizer
        if self.template == "ids":
            self.require_same_tokens(tokenizer, scorer=name)
        elif self.template == "auto" and self.has_same_tokens(tokenizer):
            settings = replace(settings, template="ids")
        process = settings.make_process(
            name,
            context,
            head=self.head,
            is_whole=False,
            separator=self.separator,
            kept_tokens=self.kept_tokens,
        )
        takes_ids = settings.template == "ids"
        reader = StepReader(
            process, tokenizer=tokenizer, takes_ids=takes_ids, timeout_s=calls.timeout_s
        )
        return ProcessRewardScorer(name, settings, weight=weight, reader=reader)


class ProcessRewardScorer(ModelScorer[RewardModelProcess]):
    def __init__(
        self, name: str, settings: ProcessRewardModel, *, weight: float, reader: StepReader
    ) -> None:
        super().__init__(name=name, weight=weight, model=reader.process)
        self.token_scores_only = settings.score is None
        self._settings = settings
        self._steps = settings.build_steps()
        self._reader = reader
        self._ahead: ReadAhead | None = None
        if settings.pipelined:
            self._ahead = ReadAhead(reader, steps=self._steps, min_tokens=settings.ahead_tokens)

    async def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        await super().close()

    def stream_callback(self, request: Request, *, task: Task) -> OnTokens | None:
        # A request of a later turn does not say where the steps of earlier turns ended.
        may_be_later_turn = request.session is not None
        needs_earlier_steps = not self._reader.takes_ids or self._settings.separator is not None
        if self._ahead is None or (may_be_later_turn and needs_earlier_steps):
            return None
        return self._ahead.stream_callback(request, prompt=task.prompt)

    async def score(self, group: Group) -> list[ScorerResult]:
        return list(await asyncio.gather(*(self._score(e, group) for e in group.episodes)))

    async def _score(self, episode: Episode, group: Group) -> ScorerResult:
        read = await asyncio.gather(
            *(self._step_values(rollout, episode, group) for rollout in episode.rollouts)
        )
        token_scores: list[TokenScores] = []
        for rollout, (ends, values) in zip(episode.rollouts, read, strict=True):
            rewards = np.zeros(len(rollout.tokens), np.float32)
            is_value = self._settings.reduce == "value"
            rewards[ends] = values if is_value else np.diff(values, prepend=0.0)
            token_scores.append(TokenScores(rewards=rewards))
        all_values = [value for _, values in read for value in values]
        score = None
        if all_values and self._settings.score is not None:
            score = float(AGGREGATES[self._settings.score](all_values))
        return ScorerResult(score=score, token_scores=tuple(token_scores))

    async def _step_values(
        self, rollout: Rollout, episode: Episode, group: Group
    ) -> tuple[list[int], list[float]]:
        """Return the last token of each step, and the value of each step."""
        ends = step_ends(rollout, steps=self._steps, tokenizer=self._reader.tokenizer)
        values = await self._ahead.values(rollout.tokens, ends) if self._ahead else []
        values += await self._reader.read(
            rollout.tokens,
            ends,
            prompt=episode.turns[0].prompt,
            num_prompt=int(rollout.mask.argmax()),
            num_known=len(values),
        )
        _check_finite(values, scorer=self.name, group=group)
        return ends, values


def _check_finite(values: Sequence[float], *, scorer: str, group: Group) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ScoreError(
                f"Reward model {scorer!r} returned {value} for group {group.number}; try dtype ="
                " 'float32', or another model."
            )
