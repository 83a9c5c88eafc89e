"""The scorer type "reward_model": a transformers classifier that scores whole conversations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.cluster.messages import StepReading
from millrace.core.errors import ScoreError
from millrace.core.records import Episode, Group, ScorerResult
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.reward_models.process import RewardModelProcess, start_message
from millrace.scoring.reward_models.settings import ModelSettings
from millrace.scoring.scorer_type import CallSettings, ScorerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModel(ModelSettings):
    """A sequence-classification model in a process of its own."""

    @property
    def default_name(self) -> str:
        return "reward_model"

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "RewardModelScorer":
        settings = self.checked(scorer=name)
        if self.template == "ids":
            self.require_same_tokens(context.run_info.tokenizer, scorer=name)
        process = RewardModelProcess(
            name,
            start=start_message(
                settings, device=context.device_of(name), head="sequence", is_whole=True
            ),
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )
        return RewardModelScorer(
            name,
            weight=weight,
            timeout_s=calls.timeout_s,
            takes_ids=self.template == "ids",
            process=process,
        )


class RewardModelScorer(ModelScorer):
    """Runs on the controller's event loop."""

    def __init__(
        self,
        name: str,
        *,
        weight: float,
        timeout_s: float,
        takes_ids: bool,
        process: RewardModelProcess,
    ) -> None:
        super().__init__(name, process, weight=weight)
        self._timeout_s = timeout_s
        self._takes_ids = takes_ids
        self._process = process

    async def score(self, group: Group) -> list[ScorerResult]:
        readings = [self._reading(episode) for episode in group.episodes]
        values = await self._process.read(readings, timeout_s=self._timeout_s)
        check_finite([value for (value,) in values], scorer=self.name, group=group)
        return [ScorerResult(score=value) for (value,) in values]

    def _reading(self, episode: Episode) -> StepReading:
        if self._takes_ids:
            tokens = episode.rollouts[-1].tokens
            return StepReading(tokens=tokens, ends=[len(tokens) - 1])
        turn = episode.turns[-1]
        return StepReading(prompt=turn.prompt, pieces=[turn.completion])


def check_finite(values: Sequence[float], *, scorer: str, group: Group) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ScoreError(
                f"Reward model {scorer!r} returned {value} for group {group.number}; try dtype ="
                " 'float32', or another model."
            )
