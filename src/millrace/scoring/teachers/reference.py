"""The scorer type "reference": the model that the KL penalty of the loss compares with.

A reference runs in a model process. In a LoRA run without `model` it needs none: the trainer holds
the starting weights beneath its adapter and computes the reference logprobs itself (see Trainer).
"""

from dataclasses import dataclass

from millrace.core.plugins import plugin
from millrace.core.protocols import Scorer
from millrace.core.records import (
    Group,
    Rollout,
    ScorerResult,
    TokenLogprobs,
    TokenScores,
    score_request_for,
)
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.teachers.process import (
    LogprobModelSettings,
    LogprobScorer,
    check_same_vocabulary,
    scatter,
)


@plugin
class Reference(LogprobModelSettings):
    model: str | None = None
    """Directory or hub name. Default: the model that the run starts from."""

    default_name = "reference"

    def check_model(self, run: RunInfo, *, name: str) -> None:
        if self.model is not None:
            check_same_vocabulary(self.model, run, num_top=0, name=name)

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> Scorer:
        run = context.run_info
        if run.config.lora is not None and self.model is None:
            return TrainerReference(name=name, weight=weight)
        process = self.make_process(
            name, model=self.model or run.config.model.path, context=context
        )
        return ReferenceScorer(name=name, weight=weight, model=process, timeout_s=calls.timeout_s)


@dataclass(kw_only=True, eq=False)
class TrainerReference:
    """Placeholder for a reference that the trainer computes. It returns no scores."""

    name: str
    weight: float
    token_scores_only = True

    async def score(self, group: Group) -> list[ScorerResult]:
        return [ScorerResult()] * len(group.episodes)


class ReferenceScorer(LogprobScorer):
    """Returns the reference model's logprob of each sampled token. The distribution is the one that
    sampling from the reference would use: the same temperature, restricted to the same kept ids."""

    async def score(self, group: Group) -> list[ScorerResult]:
        requests = [
            score_request_for(r, temperature=r.sampling.temperature, kept=r.kept)
            for r in group.rollouts
        ]
        return await self._score(group, requests, to_scores=_to_scores)


def _to_scores(found: TokenLogprobs, rollout: Rollout) -> TokenScores:
    return TokenScores(reference_logprobs=scatter(found.logprobs, rollout))
