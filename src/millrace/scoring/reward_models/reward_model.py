"""The scorer types "reward_model" and "process_reward_model": transformers classifiers.

A reward model scores whole conversations. A process reward model values the steps of an episode. A
step's reward belongs to its last token. The episode's score, if wanted, is computed from the values
of its steps. A model may have another tokenizer than the policy. Scorers run on the controller's
event loop.
"""

import asyncio
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np

from millrace.cluster.messages import StartRewardModel, StepReading
from millrace.config.section import Dtype, PositiveInt
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.plugins import plugin
from millrace.core.protocols import OnTokens
from millrace.core.records import Episode, Group, Request, Rollout, ScorerResult, Task, TokenScores
from millrace.models.directory import load_tokenizer, max_positions, text_config
from millrace.scoring.functions.function_scorer import reply_of
from millrace.scoring.model_process import MODEL_CALLS, ModelScorer
from millrace.scoring.reward_models.steps import (
    ReadAhead,
    RewardModelProcess,
    StepReader,
    Steps,
    build_steps,
    step_ends,
)
from millrace.scoring.scorer_type import CallSettings, ScorerContext

Template = Literal["auto", "chat", "text", "ids"]
Head = Literal["token", "sequence"]


@plugin
class RewardModelSettings:
    """The fields are keys of [[scorers]]."""

    model: str  # directory or hub name
    label: int | None = None
    """Label whose probability is the score. Without it, the score is the only label's logit."""
    template: Template = "auto"
    """Input of the model. "chat": messages through the chat template of its tokenizer. "text":
    prompt and completion as text. "ids": the policy's tokens, for a model with the same tokenizer.
    "auto": chat for messages if the tokenizer has a chat template, otherwise text."""
    dtype: Dtype = "auto"  # "auto" is bfloat16 on CUDA and float32 on a CPU
    threads: PositiveInt = 1  # CPU threads
    batch_tokens: PositiveInt = 8192  # of one pass, with padding; a longer sequence gets its own
    max_length: PositiveInt | None = None  # of a sequence, in tokens; default: the model's limit
    trust_remote_code: bool = False

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return MODEL_CALLS  # one call per finished episode; the process batches them

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        self.checked(scorer=name)

    def checked(self, *, scorer: str) -> Self:
        """Return the settings with max_length filled in; raises ConfigError. Reads no weights."""
        config = text_config(
            self.model,
            trust_remote_code=self.trust_remote_code,
            setting=f"model of scorer {scorer!r}",
        )
        self._check_label([str(name) for name in (config.id2label or {}).values()], scorer=scorer)
        limit = max_positions(config)
        wanted = self.max_length
        if wanted is not None and limit is not None and wanted > limit:
            raise ConfigError(
                f"Scorer {scorer!r}: max_length = {wanted} is more than the {limit} tokens that"
                f" {self.model!r} reads; lower it."
            )
        if self.template == "chat" and not self._tokenizer().chat_template:
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'chat', but the tokenizer of {self.model!r} has no"
                " chat template; set template to 'text'."
            )
        return replace(self, max_length=wanted if wanted is not None else limit)

    def has_same_tokens(self, policy: Any) -> bool:
        """True if the policy's token ids mean the same to this model; `policy` is its tokenizer."""
        return self._tokenizer().get_vocab() == policy.get_vocab()

    def require_same_tokens(self, policy: Any, *, scorer: str) -> None:
        if not self.has_same_tokens(policy):
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'ids' sends the policy's tokens, but the tokenizer"
                f" of {self.model!r} differs; set template to 'chat' or 'text'."
            )

    def start_message(self, **options: Any) -> StartRewardModel:
        own = {field.name: getattr(self, field.name) for field in fields(RewardModelSettings)}
        return StartRewardModel(settings=own, **options)

    def make_process(self, name: str, context: ScorerContext, **options: Any) -> RewardModelProcess:
        return RewardModelProcess(
            name,
            start=self.start_message(device=context.device_of(name), **options),
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )

    def _check_label(self, names: list[str], *, scorer: str) -> None:
        if self.label is None and len(names) > 1:
            labels = ", ".join(f"{number} = {name!r}" for number, name in enumerate(names))
            raise ConfigError(
                f"Scorer {scorer!r}: model {self.model!r} has {len(names)} labels ({labels}); set"
                " label to the number of the one whose probability is the score."
            )
        if self.label is not None and not (len(names) > 1 and 0 <= self.label < len(names)):
            raise ConfigError(
                f"Scorer {scorer!r}: label = {self.label} does not exist in model {self.model!r},"
                f" which has {len(names)}; set a number from 0 on, or remove label if there is only"
                " one."
            )

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model, trust_remote_code=self.trust_remote_code)


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
        readings = [self._reading(episode, group.task) for episode in group.episodes]
        given = [reading for reading in readings if reading is not None]
        values = [value for (value,) in await self.model.read(given, timeout_s=self.timeout_s)]
        _check_finite(values, scorer=self.name, group=group)
        left = iter(values)
        return [ScorerResult(score=None if r is None else next(left)) for r in readings]

    def _reading(self, episode: Episode, task: Task) -> StepReading | None:
        """None without tokens: an evaluated episode may end before the first reply."""
        if not self.takes_ids:
            prompt = episode.turns[-1].prompt if episode.turns else task.prompt
            return StepReading(prompt=prompt, pieces=[reply_of(episode)])
        if not episode.rollouts:
            return None
        ids = episode.rollouts[-1].tokens
        return StepReading(tokens=ids, ends=[len(ids) - 1])


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
    reduce: Literal["value", "difference"] = "value"
    """Reward of a step: its value, or the difference to the value of the step before."""
    score: Aggregate | None = None  # of the episode: min, mean or last of its step values
    separator: str | None = None  # inserted after each step; the model is read at it
    pipelined: bool = True  # read steps while the rest of the sequence is still being generated
    ahead_tokens: PositiveInt = 32  # new tokens that trigger the next read of a running sequence
    kept_tokens: PositiveInt = 65_536  # whose KV a causal model keeps until the next step arrives

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
        self._ahead = ReadAhead(reader, steps=self._steps, min_tokens=settings.ahead_tokens)

    async def close(self) -> None:
        self._ahead.close()
        await super().close()

    def stream_callback(self, request: Request, *, task: Task) -> OnTokens | None:
        # A request of a later turn does not say where the steps of earlier turns ended.
        may_be_later_turn = request.session is not None
        needs_earlier_steps = not self._reader.takes_ids or self._settings.separator is not None
        if not self._settings.pipelined or (may_be_later_turn and needs_earlier_steps):
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
        values = await self._ahead.values(rollout.tokens, ends)
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
