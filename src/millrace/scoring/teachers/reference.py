"""The scorer type "reference": the model that the KL penalty of the loss compares with.

A reference runs in a model process. In a LoRA run without `model` it needs none: the trainer holds
the starting weights beneath its adapter and computes the reference logprobs itself (see Trainer).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.protocols import Scorer
from millrace.core.records import Group, ScorerResult, Task, TokenScores, score_request_for
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.teachers.logprob_model import (
    MODEL_CALLS,
    check_lengths,
    check_same_vocabulary,
    make_process,
    max_context_of,
    results_of,
    scatter,
)
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.settings import LogprobModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference(LogprobModelSettings):
    """The reference model for loss.kl."""

    model: str | None = None
    """Directory or hub name. Default: the model that the run starts from."""

    @property
    def default_name(self) -> str:
        return "reference"

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return MODEL_CALLS

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """A reference works with any task."""

    def check_model(self, run: RunInfo, *, name: str) -> None:
        if self.model is not None:
            check_same_vocabulary(self.model, run, num_top=0, name=name)

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> Scorer:
        if self.is_in_trainer(context.run_info):
            return TrainerReference(name, weight=weight)
        model = self.model or context.run_info.config.model.path
        return ReferenceScorer(
            make_process(self, name=name, model=model, context=context),
            weight=weight,
            timeout_s=calls.timeout_s,
            max_context=max_context_of(model, context.run_info),
        )

    def is_in_trainer(self, run: RunInfo) -> bool:
        """True if the trainer has the starting weights anyway, beneath the adapter."""
        return run.config.lora is not None and self.model is None


class TrainerReference:
    """Placeholder for a reference that the trainer computes. It returns no scores."""

    token_scores_only = True

    def __init__(self, name: str, *, weight: float) -> None:
        self.name = name
        self.weight = weight

    async def score(self, group: Group) -> list[ScorerResult]:
        return [ScorerResult()] * len(group.episodes)


class ReferenceScorer(ModelScorer):
    """Returns the reference model's logprob of each sampled token.

    The distribution is the one that sampling from the reference would use: the same temperature,
    restricted to the same kept ids.
    """

    token_scores_only = True

    def __init__(
        self, process: TeacherProcess, *, weight: float, timeout_s: float, max_context: int
    ) -> None:
        super().__init__(process.name, process, weight=weight)
        self._process = process
        self._timeout_s = timeout_s
        self._max_context = max_context

    async def score(self, group: Group) -> list[ScorerResult]:
        requests = [
            score_request_for(r, temperature=r.sampling.temperature, kept=r.kept)
            for r in group.rollouts
        ]
        check_lengths(requests, max_context=self._max_context, scorer=self.name, group=group)
        logprobs = await self._process.score(requests, timeout_s=self._timeout_s)
        return results_of(
            group,
            [
                TokenScores(reference_logprobs=scatter(found.logprobs, rollout))
                for rollout, found in zip(group.rollouts, logprobs, strict=True)
            ],
        )
