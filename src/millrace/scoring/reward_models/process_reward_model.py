"""A process reward model as a Scorer: a reward for each step of an episode, at the step's last
token, and perhaps a score of the episode.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from millrace.core.protocols import OnTokens
from millrace.core.records import Episode, Group, Notes, Request, Rollout, Task, Verdict
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.reward_models.process import RewardModelProcess, StepReader, start_message
from millrace.scoring.reward_models.read_ahead import ReadAhead
from millrace.scoring.reward_models.reward_model import check_finite
from millrace.scoring.reward_models.settings import ModelSettings, check_choice, check_counts
from millrace.scoring.reward_models.steps import Steps, build_steps, step_ends
from millrace.scoring.scorer_kind import CallRules, ScorerTools

Head = Literal["token", "sequence"]
Reduce = Literal["value", "difference"]
Aggregate = Literal["min", "mean", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRewardModel(ModelSettings):
    """A transformers model that values steps, in a process of its own.

    As for reward models, but template = "auto" is "ids" if the tokenizers are the same; with text,
    steps are laid behind the prompt one by one.
    """

    head: Head = "token"
    """ "token": a token-classification model, read at the last token of each step. "sequence": a
    sequence-classification model, which values the text up to there."""
    steps: Mapping[str, Any] = field(default_factory=lambda: {"by": "delimiter"})
    """What a step is: {by = "delimiter", delimiter = "\\n\\n"}, {by = "turn"}, or {by = "entropy",
    threshold = 2.0} (or quantile = 0.9)."""
    reduce: Reduce = "value"
    """A step's reward: what it is worth, or by how much it is worth more than the step before."""
    score: Aggregate | None = None
    """Also a score of the episode: the least, the mean or the last of its steps' values."""
    separator: str | None = None
    """Put behind each step for the model, which is read there, as some were trained."""
    pipelined: bool = True
    """Read steps as soon as they are finished, while the rest is still being generated."""
    ahead_tokens: int = 32
    """That are sampled from one read to the next, until a sequence has ended."""
    kept_tokens: int = 65_536
    """Whose keys and values a causal model keeps in memory until the next step is there."""

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        check_counts(self, "ahead_tokens", "kept_tokens")
        check_choice("head", self.head, get_args(Head))
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("score", self.score, (*get_args(Aggregate), None))
        self._steps()

    @property
    def default_name(self) -> str:
        return "process_reward_model"

    def make(
        self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools
    ) -> "ProcessRewardScorer":
        settings = self.checked(scorer=name)
        if self.template == "ids":
            self.require_same_tokens(tools.facts.tokenizer, scorer=name)
        elif self.template == "auto" and self.has_same_tokens(tools.facts.tokenizer):
            settings = replace(settings, template="ids")
        start = start_message(
            settings,
            head=self.head,
            is_whole=False,
            separator=self.separator,
            kept_tokens=self.kept_tokens,
        )
        process = RewardModelProcess(
            name,
            start=start,
            worker_pool=tools.worker_pool,
            start_timeout_s=tools.start_timeout_s,
        )
        reader = StepReader(
            process,
            tokenizer=tools.facts.tokenizer,
            takes_ids=settings.template == "ids",
            timeout_s=rules.timeout_s,
        )
        ahead = ReadAhead(
            reader,
            steps=self._steps(),
            tokenizer=tools.facts.tokenizer,
            min_tokens=self.ahead_tokens,
        )
        return ProcessRewardScorer(
            name,
            weight=weight,
            steps=self._steps(),
            reduce=self.reduce,
            aggregate=self.score,
            tokenizer=tools.facts.tokenizer,
            reader=reader,
            ahead=ahead if self.pipelined else None,
            of_later_turns=settings.template == "ids" and self.separator is None,
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
        of_later_turns: bool = True,
    ) -> None:
        """`of_later_turns`: whether steps of these can be read ahead, too, although a request does
        not say where the steps before it ended."""
        super().__init__(name, reader.process, weight=weight)
        self.only_notes = aggregate is None
        self._steps = steps
        self._reduce: Reduce = reduce
        self._aggregate: Aggregate | None = aggregate
        self._tokenizer = tokenizer
        self._reader = reader
        self._ahead = ahead
        self._of_later_turns = of_later_turns

    async def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        await super().close()

    def listen(self, request: Request, *, task: Task) -> OnTokens | None:
        may_be_later = request.session is not None
        if self._ahead is None or (may_be_later and not self._of_later_turns):
            return None
        return self._ahead.listen(request, prompt=task.prompt)

    async def score(self, group: Group) -> list[Verdict]:
        return list(await asyncio.gather(*(self._judge(one, group) for one in group.episodes)))

    async def _judge(self, episode: Episode, group: Group) -> Verdict:
        judged = await asyncio.gather(
            *(self._values(rollout, episode, group) for rollout in episode.rollouts)
        )
        notes = tuple(
            Notes(rewards=_rewards(rollout, ends, self._reduced(values)))
            for rollout, (ends, values) in zip(episode.rollouts, judged, strict=True)
        )
        return Verdict(score=self._aggregated([v for _, vs in judged for v in vs]), notes=notes)

    async def _values(
        self, rollout: Rollout, episode: Episode, group: Group
    ) -> tuple[list[int], list[float]]:
        """The ends of its steps, and what each is worth."""
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

    def _reduced(self, values: list[float]) -> np.ndarray:  # [steps]
        if self._reduce == "value":
            return np.array(values)
        return np.diff(values, prepend=0.0)

    def _aggregated(self, values: list[float]) -> float | None:
        if self._aggregate is None or not values:
            return None
        of_all = {"min": min(values), "mean": float(np.mean(values)), "last": values[-1]}
        return of_all[self._aggregate]


def _rewards(rollout: Rollout, ends: list[int], of_steps: np.ndarray) -> np.ndarray:
    """[L] float32: of each step at its last token."""
    rewards = np.zeros(len(rollout.tokens), np.float32)
    rewards[ends] = of_steps
    return rewards
