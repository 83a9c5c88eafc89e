"""The scorer types "teacher" and "self_teacher": models whose logprobs the policy distils.

A teacher is a fixed model in a process of its own, or on a server (remote.py). A self-teacher is
made of earlier versions of the policy, which it receives during the run.

Promise: teachers return no episode score, so a run with teachers alone has scores of 0. A group
whose task a teacher does not cover gets nothing from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.core.errors import ConfigError
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
from millrace.scoring.model_process import ModelScorer
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.services.endpoint import Endpoint, check_endpoint
from millrace.scoring.setting_checks import check_exactly_one, check_integer, check_text
from millrace.scoring.teachers.logprob_model import (
    MODEL_CALLS,
    LogprobModel,
    check_lengths,
    check_same_vocabulary,
    make_process,
    max_context_of,
    results_of,
    scatter,
)
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.remote import MAX_ANSWER_BYTES, RemoteTeacher
from millrace.scoring.teachers.settings import TeacherSettings

Render = Callable[[Prompt], np.ndarray]  # prompt -> its tokens [P] int32


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher(TeacherSettings):
    """A fixed model with the policy's tokenizer, in a local process or on a server."""

    model: str | None = None
    """Directory or hub name of a local teacher. Set either `model` or `url`."""
    url: str | None = None
    """Address of the /score route of `millrace serve MODEL --scorers N`."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """HTTP headers for `url`. Values may contain env:NAME."""

    def __post_init__(self) -> None:
        TeacherSettings.__post_init__(self)
        reason = "a teacher is either a local model or a server"
        check_exactly_one(reason, model=self.model, url=self.url)
        if self.url is not None:
            check_text(url=self.url)

    @property
    def default_name(self) -> str:
        return "teacher"

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return MODEL_CALLS if self.url is None else CallSettings(timeout_s=300.0, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_tasks(self, tasks, name=name)
        if self.url is not None:
            check_endpoint(self.url, self.headers, scorer=name)

    def check_model(self, run: RunInfo, *, name: str) -> None:
        """Check a local model. A server is checked by RemoteTeacher.start()."""
        if self.model is not None:
            check_same_vocabulary(self.model, run, num_top=self.num_top, name=name)

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> Scorer:
        run = context.run_info
        if self.model is None:
            model, max_context = self._remote(name, calls=calls, run=run), None
        else:
            model = make_process(self, name=name, model=self.model, context=context)
            max_context = max_context_of(self.model, run)
        return TeacherScorer(
            model,
            self,
            weight=weight,
            timeout_s=calls.timeout_s,
            max_context=max_context,
            render=run.render,
        )

    def _remote(self, name: str, *, calls: CallSettings, run: RunInfo) -> RemoteTeacher:
        assert self.url is not None
        endpoint = Endpoint(
            self.url,
            headers=self.headers,
            timeout_s=calls.timeout_s,
            scorer=name,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        return RemoteTeacher(
            name,
            endpoint=endpoint,
            vocabulary=vocabulary_checksum(run.tokenizer),
            vocab_size=run.vocab_size,
            num_top=self.num_top,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTeacher(TeacherSettings):
    """An earlier version of the policy, or a moving average of its versions."""

    lag: int | None = None
    """Age of the teacher in versions. Set either `lag` or `ema`."""
    ema: float | None = None
    """Decay of an exponential moving average over the policy's versions, between 0 and 1."""
    every: int = 1
    """Number of versions between two refreshes."""

    def __post_init__(self) -> None:
        TeacherSettings.__post_init__(self)
        check_exactly_one("a self-teacher has either lag or ema", lag=self.lag, ema=self.ema)
        if self.lag is not None:
            check_integer(0, lag=self.lag)
        if self.ema is not None and not (isinstance(self.ema, float) and 0 < self.ema < 1):
            raise ValueError(f"ema = {self.ema!r} must be a number between 0 and 1")
        check_integer(1, every=self.every)

    @property
    def default_name(self) -> str:
        return "self_teacher"

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return MODEL_CALLS

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_tasks(self, tasks, name=name)

    def check_model(self, run: RunInfo, *, name: str) -> None:
        check_same_vocabulary(run.config.model.path, run, num_top=self.num_top, name=name)
        transport = run.config.weights.transport
        if transport == "collective" or (transport == "auto" and run.config.engine.remote > 0):
            raise ConfigError(
                f"Scorer {name!r} must receive every version, but weights.transport ="
                f" {transport!r} broadcasts to the engines only; choose another transport."
            )

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> Scorer:
        run = context.run_info
        following = {"lag": self.lag, "ema": self.ema, "every": self.every}
        process = make_process(
            self, name=name, model=run.model_path, context=context, following=following
        )
        return SelfTeacherScorer(
            process,
            self,
            weight=weight,
            timeout_s=calls.timeout_s,
            max_context=max_context_of(run.model_path, run),
            render=run.render,
        )


class TeacherScorer(ModelScorer):
    """Returns the teacher's logprobs of the sampled tokens. Runs on the controller's loop."""

    token_scores_only = True

    def __init__(
        self,
        model: LogprobModel,
        settings: TeacherSettings,
        *,
        weight: float,
        timeout_s: float,
        max_context: int | None,
        render: Render,
    ) -> None:
        """`max_context` is the longest sequence; None = the model refuses longer ones itself."""
        super().__init__(model.name, model, weight=weight)
        self._logprob_model = model
        self._settings = settings
        self._timeout_s = timeout_s
        self._max_context = max_context
        self._render = render

    async def score(self, group: Group) -> list[ScorerResult]:
        settings = self._settings
        if not covers(settings, group.task):
            return [ScorerResult()] * len(group.episodes)
        prompt = None
        if settings.hint is not None:
            prompt = self._render(hinted_prompt(group.task, settings))
        requests = [
            score_request_for(
                rollout,
                temperature=settings.temperature,
                top_k=settings.num_top,
                prompt_override=prompt,
            )
            for rollout in group.rollouts
        ]
        check_lengths(requests, max_context=self._max_context, scorer=self.name, group=group)
        found = await self._logprob_model.score(requests, timeout_s=self._timeout_s)
        return results_of(
            group,
            [
                TokenScores(teacher=_spread(logprobs, rollout, has_top=settings.num_top > 0))
                for rollout, logprobs in zip(group.rollouts, found, strict=True)
            ],
        )


class SelfTeacherScorer(TeacherScorer):
    """A teacher that receives the policy's versions."""

    def __init__(self, process: TeacherProcess, settings: TeacherSettings, **rest: Any) -> None:
        super().__init__(process, settings, **rest)
        self._process = process

    async def swap(self, update: WeightUpdate) -> int:
        return await self._process.swap(update)


def covers(settings: TeacherSettings, task: Task) -> bool:
    """True if the teacher scores this task."""
    if not settings.tasks:
        return True
    if settings.column is None:
        return task.source in settings.tasks
    return str(task.columns.get(settings.column)) in settings.tasks


def hinted_prompt(task: Task, settings: TeacherSettings) -> Prompt:
    """Return the prompt that the teacher reads, with the task's hint in it."""
    assert settings.hint is not None
    hint = str(task.columns[settings.hint])

    def fill(prompt: str) -> str:  # not str.format: a hint may contain braces
        return settings.template.replace("{prompt}", prompt).replace("{hint}", hint)

    if isinstance(task.prompt, str):
        return fill(task.prompt)
    *before, last = task.prompt
    return [*before, {**last, "content": fill(last["content"])}]


def check_tasks(settings: TeacherSettings, tasks: Sequence[Task], *, name: str) -> None:
    """Raise ConfigError unless the teacher covers some task, and each of these has a hint."""
    covered = [task for task in tasks if covers(settings, task)]
    if tasks and not covered:
        problem = "no [[tasks.source]] has such a name"
        if settings.column is not None:
            problem = f"no task has such a value in its column {settings.column!r}"
        raise ConfigError(
            f"Scorer {name!r} covers tasks = {list(settings.tasks)}, but {problem}; correct them,"
            " or remove `tasks` to cover all."
        )
    for task in covered:
        if settings.hint is not None and settings.hint not in task.columns:
            raise ConfigError(
                f"Scorer {name!r} reads its hint from column {settings.hint!r}, which task"
                f" {str(task.prompt)[:60]!r} does not have; its columns are:"
                f" {', '.join(task.columns) or 'none'}."
            )


def _spread(found: TokenLogprobs, rollout: Rollout, *, has_top: bool) -> TeacherLogprobs:
    return TeacherLogprobs(
        logprobs=scatter(found.logprobs, rollout),
        top_ids=scatter(found.top_ids, rollout) if has_top else None,
        top_logprobs=scatter(found.top_logprobs, rollout) if has_top else None,
        version=found.version,
    )
