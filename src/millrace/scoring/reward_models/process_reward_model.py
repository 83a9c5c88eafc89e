"""The scorer type "process_reward_model": a reward for each step of an episode.

A step's reward belongs to its last token. The episode's score, if wanted, is computed from the
values of its steps.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from millrace.core.protocols import OnTokens
from millrace.core.records import (
    Episode,
    Group,
    Request,
    Rollout,
    ScorerResult,
    Task,
    TokenScores,
)
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.reward_models.process import RewardModelProcess, StepReader, start_message
from millrace.scoring.reward_models.read_ahead import ReadAhead
from millrace.scoring.reward_models.reward_model import check_finite
from millrace.scoring.reward_models.settings import ModelSettings
from millrace.scoring.reward_models.steps import Steps, build_steps, step_ends
from millrace.scoring.scorer_type import CallSettings, ScorerContext
from millrace.scoring.setting_checks import check_choice, check_integer

Head = Literal["token", "sequence"]
Reduce = Literal["value", "difference"]
Aggregate = Literal["min", "mean", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRewardModel(ModelSettings):
    """A transformers model that values steps, in a process of its own.

    Unlike for reward models, template = "auto" means "ids" if the tokenizers are the same. With
    text, the steps are appended to the prompt one by one.
    """

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
    ahead_tokens: int = 32
    """Number of new tokens that trigger the next read of an unfinished sequence."""
    kept_tokens: int = 65_536
    """Number of tokens whose KV a causal model keeps until the next step arrives."""

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        check_integer(1, ahead_tokens=self.ahead_tokens, kept_tokens=self.kept_tokens)
        check_choice("head", self.head, get_args(Head))
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("score", self.score, (*get_args(Aggregate), None))
        self._steps()

    @property
    def default_name(self) -> str:
        return "process_reward_model"

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "ProcessRewardScorer":
        settings, tokenizer = self.checked(scorer=name), context.run_info.tokenizer
        if self.template == "ids":
            self.require_same_tokens(tokenizer, scorer=name)
        elif self.template == "auto" and self.has_same_tokens(tokenizer):
            settings = replace(settings, template="ids")
        start = start_message(
            settings,
            device=context.device_of(name),
            head=self.head,
            is_whole=False,
            separator=self.separator,
            kept_tokens=self.kept_tokens,
        )
        process = RewardModelProcess(
            name,
            start=start,
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )
        takes_ids = settings.template == "ids"
        reader = StepReader(
            process, tokenizer=tokenizer, takes_ids=takes_ids, timeout_s=calls.timeout_s
        )
        steps, ahead = self._steps(), None
        if self.pipelined:
            ahead = ReadAhead(
                reader, steps=steps, tokenizer=tokenizer, min_tokens=self.ahead_tokens
            )
        return ProcessRewardScorer(
            name,
            weight=weight,
            steps=steps,
            reduce=self.reduce,
            aggregate=self.score,
            tokenizer=tokenizer,
            reader=reader,
            ahead=ahead,
            streams_later_turns=takes_ids and self.separator is None,
        )

    def _steps(self) -> Steps:
        return build_steps(self.steps, section="scorer.steps")


class ProcessRewardScorer(ModelScorer):
    """Runs on the controller's event loop."""

    def __init__(
        self,
        name: str,
        *,
        weight: float,
        steps: Steps,
        reduce: Reduce,
        aggregate: Aggregate | None,
        tokenizer: Any,
        reader: StepReader,
        ahead: ReadAhead | None = None,
        streams_later_turns: bool = True,
    ) -> None:
        """`streams_later_turns`: steps after the first turn can be read ahead, although a request
        does not say where earlier steps ended."""
        super().__init__(name, reader.process, weight=weight)
        self.token_scores_only = aggregate is None
        self._steps = steps
        self._reduce: Reduce = reduce
        self._aggregate: Aggregate | None = aggregate
        self._tokenizer = tokenizer
        self._reader = reader
        self._ahead = ahead
        self._streams_later_turns = streams_later_turns

    async def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        await super().close()

    def stream_callback(self, request: Request, *, task: Task) -> OnTokens | None:
        may_be_later_turn = request.session is not None
        if self._ahead is None or (may_be_later_turn and not self._streams_later_turns):
            return None
        return self._ahead.stream_callback(request, prompt=task.prompt)

    async def score(self, group: Group) -> list[ScorerResult]:
        return list(await asyncio.gather(*(self._score(e, group) for e in group.episodes)))

    async def _score(self, episode: Episode, group: Group) -> ScorerResult:
        read = await asyncio.gather(
            *(self._step_values(rollout, episode, group) for rollout in episode.rollouts)
        )
        token_scores = tuple(
            TokenScores(rewards=self._token_rewards(rollout, ends, values))
            for rollout, (ends, values) in zip(episode.rollouts, read, strict=True)
        )
        score = self._episode_score([value for _, values in read for value in values])
        return ScorerResult(score=score, token_scores=token_scores)

    async def _step_values(
        self, rollout: Rollout, episode: Episode, group: Group
    ) -> tuple[list[int], list[float]]:
        """Return the last token of each step, and the value of each step."""
        ends = step_ends(rollout, steps=self._steps, tokenizer=self._tokenizer)
        values = await self._ahead.values(rollout.tokens, ends) if self._ahead else []
        values += await self._reader.read(
            rollout.tokens,
            ends,
            prompt=episode.turns[0].prompt,
            num_prompt=int(rollout.mask.argmax()),
            num_known=len(values),
        )
        check_finite(values, scorer=self.name, group=group)
        return ends, values

    def _token_rewards(
        self, rollout: Rollout, ends: list[int], values: list[float]
    ) -> np.ndarray:  # [L] float32
        rewards = np.zeros(len(rollout.tokens), np.float32)
        rewards[ends] = values if self._reduce == "value" else np.diff(values, prepend=0.0)
        return rewards

    def _episode_score(self, values: list[float]) -> float | None:
        if self._aggregate is None or not values:
            return None
        match self._aggregate:
            case "min":
                return min(values)
            case "mean":
                return float(np.mean(values))
            case "last":
                return values[-1]
