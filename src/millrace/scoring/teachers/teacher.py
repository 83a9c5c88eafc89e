"""The scorer types "teacher", "self_teacher" and "reference": models that score sampled tokens.

The policy distils the logprobs of teachers. A teacher is a fixed model in a process of its own, or
on a server. A self-teacher is made of earlier versions of the policy, which it receives
during the run. The KL penalty of the loss compares with the reference, which runs in a process too.
In a LoRA run without `model` it needs none: the trainer holds the starting weights beneath its
adapter and computes the reference logprobs itself (see Trainer).

Promise: teachers return no episode score, so a run with teachers alone has scores of 0. A group
whose task a teacher does not cover gets nothing from it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from millrace.config.section import (
    NonEmptyStr,
    NonNegativeInt,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
)
from millrace.core.errors import ConfigError
from millrace.core.plugins import check_exactly_one, plugin
from millrace.core.protocols import Scorer
from millrace.core.records import (
    Group,
    Prompt,
    Rollout,
    ScorerResult,
    Task,
    TeacherLogprobs,
    TokenLogprobs,
    TokenScores,
    WeightUpdate,
    score_request_for,
)
from millrace.models.directory import vocabulary_checksum
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.services.endpoint import Endpoint, check_endpoint
from millrace.scoring.teachers.process import (
    MAX_ANSWER_BYTES,
    LogprobModel,
    LogprobModelSettings,
    LogprobScorer,
    RemoteTeacher,
    TeacherProcess,
    check_same_vocabulary,
    scatter,
)

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
TOP_K = 32  # default for losses that compare distributions


@plugin
class TeacherSettings(LogprobModelSettings):
    loss: Divergence = "reverse_kl"  # default of loss.distil; the weight is that of distil_weight
    beta: float = 0.5  # default of loss.distil_beta with "jsd"
    top_k: NonNegativeInt | None = None
    """Most likely tokens per position to return. Default: 0 with "reverse_kl", otherwise 32."""
    temperature: PositiveFloat = 1.0  # of the teacher's distribution, whatever that of sampling
    tasks: Annotated[tuple[str, ...], OneOrMore, Field(strict=False)] = ()
    """Names of the [tasks.source] tables that the teacher scores; empty means all tasks."""
    column: str | None = None  # if set, `tasks` lists values of this task column instead
    hint: str | None = None  # task column that the teacher sees and the policy does not
    template: str = "{hint}\n\n{prompt}"  # with `hint`: replaces the prompt, or the last message

    def __post_init__(self) -> None:
        if self.top_k == 0 and self.loss != "reverse_kl":
            raise ValueError(f"top_k = 0 must be at least 1 with loss = {self.loss!r}")
        if self.column is not None and not self.tasks:
            raise ValueError(f"column = {self.column!r} has no effect without tasks; set both")
        if "{prompt}" not in self.template or "{hint}" not in self.template:
            raise ValueError(f"template = {self.template!r} must contain {{prompt}} and {{hint}}")

    @property
    def num_top(self) -> int:
        if self.top_k is None:
            return 0 if self.loss == "reverse_kl" else TOP_K
        return self.top_k

    def covers(self, task: Task) -> bool:
        if not self.tasks:
            return True
        if self.column is None:
            return task.source in self.tasks
        return str(task.columns.get(self.column)) in self.tasks

    def hinted_prompt(self, task: Task) -> Prompt:
        assert self.hint is not None
        hint = str(task.columns[self.hint])

        def fill(prompt: str) -> str:  # in one pass: both texts may contain "{hint}" and braces
            texts = {"{prompt}": prompt, "{hint}": hint}
            return re.sub(r"\{(?:prompt|hint)\}", lambda found: texts[found[0]], self.template)

        if isinstance(task.prompt, str):
            return fill(task.prompt)
        *before, last = task.prompt
        return [*before, {**last, "content": fill(last["content"])}]

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        covered = [task for task in tasks if self.covers(task)]
        if tasks and not covered:
            problem = "no [tasks.source.NAME] has such a name"
            if self.column is not None:
                problem = f"no task has such a value in its column {self.column!r}"
            raise ConfigError(
                f"Scorer {name!r} covers tasks = {list(self.tasks)}, but {problem}; correct them,"
                " or remove `tasks` to cover all."
            )
        for task in covered:
            if self.hint is not None and self.hint not in task.columns:
                raise ConfigError(
                    f"Scorer {name!r} reads its hint from column {self.hint!r}, which task"
                    f" {str(task.prompt)[:60]!r} does not have; its columns are:"
                    f" {', '.join(task.columns) or 'none'}."
                )

    def make_model(self, name: str, *, calls: CallSettings, context: ScorerContext) -> LogprobModel:
        raise NotImplementedError

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "TeacherScorer":
        scorer = SelfTeacherScorer if isinstance(self, SelfTeacher) else TeacherScorer
        return scorer(
            name=name,
            weight=weight,
            model=self.make_model(name, calls=calls, context=context),
            settings=self,
            render=context.run_info.render,
            timeout_s=calls.timeout_s,
        )


@plugin
class Teacher(TeacherSettings):
    """A fixed model with the policy's tokenizer, in a local process or on a server."""

    model: str | None = None  # directory or hub name of a local teacher; either this or `url`
    url: NonEmptyStr | None = None  # /score route of `millrace serve MODEL --scorers N`
    headers: dict[str, str] = field(default_factory=dict[str, str])  # values may contain env:NAME

    default_name = "teacher"

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "a teacher is either a local model or a server"
        check_exactly_one(reason, model=self.model, url=self.url)

    def call_settings(self, *, num_workers: int) -> CallSettings:
        if self.url is None:
            return super().call_settings(num_workers=num_workers)
        return CallSettings(timeout_s=300.0, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        super().check(tasks, name=name)
        if self.url is not None:
            check_endpoint(self.url, self.headers, scorer=name)

    def check_model(self, run: RunInfo, *, name: str) -> None:
        """Check a local model. A server is checked by RemoteTeacher.start()."""
        if self.model is not None:
            check_same_vocabulary(self.model, run, num_top=self.num_top, name=name)

    def make_model(self, name: str, *, calls: CallSettings, context: ScorerContext) -> LogprobModel:
        if self.model is not None:
            return self.make_process(name, model=self.model, context=context)
        assert self.url is not None
        run = context.run_info
        endpoint = Endpoint(
            self.url,
            headers=self.headers,
            timeout_s=calls.timeout_s,
            scorer=name,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        return RemoteTeacher(
            name=name,
            endpoint=endpoint,
            vocabulary=vocabulary_checksum(run.tokenizer),
            vocab_size=run.vocab_size,
            num_top=self.num_top,
        )


@plugin
class SelfTeacher(TeacherSettings):
    """An earlier version of the policy, or a moving average of its versions."""

    lag: NonNegativeInt | None = None  # age of the teacher in versions; set either this or `ema`
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # decay of a moving average, per version
    every: PositiveInt = 1  # number of versions between two refreshes

    default_name = "self_teacher"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exactly_one("a self-teacher has either lag or ema", lag=self.lag, ema=self.ema)

    def check_model(self, run: RunInfo, *, name: str) -> None:
        check_same_vocabulary(run.config.model.path, run, num_top=self.num_top, name=name)

    def make_model(self, name: str, *, calls: CallSettings, context: ScorerContext) -> LogprobModel:
        run = context.run_info
        return self.make_process(
            name,
            model=run.model_path,
            context=context,
            history={"lag": self.lag, "ema": self.ema, "every": self.every},
            version=run.version,
            adapter_path=run.adapter_path,
            saved_path=_saved_path(name, context),
        )


def _saved_path(name: str, context: ScorerContext) -> str:
    path = (context.folder / f"{name}.safetensors").absolute()
    if path.exists():
        from millrace.models.loading import read_weights_version  # takes seconds to import

        if read_weights_version(path) > context.run_info.version:
            path.unlink()  # the run resumed from an earlier version and will train these again
    return str(path)


@dataclass(kw_only=True, eq=False)
class TeacherScorer(LogprobScorer):
    settings: TeacherSettings
    render: Callable[[Prompt], np.ndarray]  # prompt -> its tokens [P] int32

    async def score(self, group: Group) -> list[ScorerResult]:
        settings = self.settings
        if not settings.covers(group.task):
            return [ScorerResult()] * len(group.episodes)
        prompt = None
        if settings.hint is not None:
            prompt = self.render(settings.hinted_prompt(group.task))
        requests = [
            score_request_for(
                rollout,
                temperature=settings.temperature,
                top_k=settings.num_top,
                prompt_override=prompt,
            )
            for rollout in group.rollouts
        ]
        return await self._score(group, requests)

    def _to_scores(self, found: TokenLogprobs, rollout: Rollout) -> TokenScores:
        has_top = self.settings.num_top > 0
        logprobs = TeacherLogprobs(
            logprobs=scatter(found.logprobs, rollout),
            top_ids=scatter(found.top_ids, rollout) if has_top else None,
            top_logprobs=scatter(found.top_logprobs, rollout) if has_top else None,
            version=found.version,
        )
        return TokenScores(teacher=logprobs)


class SelfTeacherScorer(TeacherScorer):
    async def swap(self, update: WeightUpdate) -> int:
        assert isinstance(self.model, TeacherProcess)
        return await self.model.swap(update)


@plugin
class Reference(LogprobModelSettings):
    model: str | None = None  # directory or hub name; default: the model that the run starts from

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
        return await self._score(group, requests)

    def _to_scores(self, found: TokenLogprobs, rollout: Rollout) -> TokenScores:
        return TokenScores(reference_logprobs=scatter(found.logprobs, rollout))
