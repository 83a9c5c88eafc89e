"""Teachers and references as Scorers: what of a group they read, and what they note about it.

Promise: they give no score, so a run that learns from a teacher alone has scores of 0. A group that
a teacher does not teach gets nothing from it.

L = tokens of a rollout, P = those before its first sampled one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from millrace.core.errors import ScoreError
from millrace.core.records import Group, Notes, Prompt, Rollout, Task, Teaching, Verdict
from millrace.core.score_requests import ScoreRequest, TokenLogprobs, score_request_for
from millrace.core.weight_update import WeightUpdate
from millrace.scoring.model_process import ModelHandle, ModelScorer
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.settings import TeachingSettings

Render = Callable[[Prompt], np.ndarray]  # -> [P] int32


class LogprobReader(ModelHandle, Protocol):
    """A model that says how likely tokens are."""

    name: str

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises ScoreError."""
        ...


class TeacherScorer(ModelScorer):
    """Notes what a teacher says of each sampled token. Runs on the controller's event loop."""

    only_notes = True

    def __init__(
        self,
        reader: LogprobReader,
        settings: TeachingSettings,
        *,
        weight: float,
        timeout_s: float,
        max_context: int | None,
        render: Render,
    ) -> None:
        """`max_context`: the longest sequence it reads; None = the reader itself refuses more."""
        super().__init__(reader.name, reader, weight=weight)
        self._reader = reader
        self._settings = settings
        self._timeout_s = timeout_s
        self._max_context = max_context
        self._render = render

    async def score(self, group: Group) -> list[Verdict]:
        settings = self._settings
        if not teaches(settings, group.task):
            return [Verdict()] * len(group.episodes)
        hinted = None
        if settings.hint is not None:
            hinted = self._render(hinted_prompt(group.task, settings))
        requests = [
            score_request_for(
                rollout,
                temperature=settings.temperature,
                top_k=settings.num_top,
                prompt_override=hinted,
            )
            for rollout in group.rollouts
        ]
        check_lengths(requests, max_context=self._max_context, scorer=self.name, group=group)
        told = await self._reader.score(requests, timeout_s=self._timeout_s)
        notes = [
            Notes(teaching=_teaching(rollout, logprobs, has_top=settings.num_top > 0))
            for rollout, logprobs in zip(group.rollouts, told, strict=True)
        ]
        return verdicts(group, notes)


class FollowingScorer(TeacherScorer):
    """One whose teacher is made of the policy's own versions."""

    def __init__(self, process: TeacherProcess, settings: TeachingSettings, **rest: Any) -> None:
        super().__init__(process, settings, **rest)
        self._process = process

    async def swap(self, update: WeightUpdate) -> int:
        return await self._process.swap(update)


class ReferenceScorer(ModelScorer):
    """Notes what a reference model says of each sampled token, in the distribution that its own
    sampling would have drawn from: at the same temperature, restricted to the same ids."""

    only_notes = True

    def __init__(
        self, process: TeacherProcess, *, weight: float, timeout_s: float, max_context: int
    ) -> None:
        super().__init__(process.name, process, weight=weight)
        self._process = process
        self._timeout_s = timeout_s
        self._max_context = max_context

    async def score(self, group: Group) -> list[Verdict]:
        requests = [
            score_request_for(r, temperature=r.sampling.temperature, kept=r.kept)
            for r in group.rollouts
        ]
        check_lengths(requests, max_context=self._max_context, scorer=self.name, group=group)
        told = await self._process.score(requests, timeout_s=self._timeout_s)
        notes = [
            Notes(reference_logprobs=_spread(logprobs.logprobs, rollout))
            for rollout, logprobs in zip(group.rollouts, told, strict=True)
        ]
        return verdicts(group, notes)


def teaches(settings: TeachingSettings, task: Task) -> bool:
    if not settings.tasks:
        return True
    if settings.column is None:
        return task.source in settings.tasks
    return str(task.columns.get(settings.column)) in settings.tasks


def hinted_prompt(task: Task, settings: TeachingSettings) -> Prompt:
    """The prompt as the teacher is given it."""
    assert settings.hint is not None
    hint = str(task.columns[settings.hint])

    def filled(prompt: str) -> str:  # by hand: a hint may have braces of its own
        return settings.template.replace("{prompt}", prompt).replace("{hint}", hint)

    if isinstance(task.prompt, str):
        return filled(task.prompt)
    *before, last = task.prompt
    return [*before, {**last, "content": filled(last["content"])}]


def check_lengths(
    requests: Sequence[ScoreRequest], *, max_context: int | None, scorer: str, group: Group
) -> None:
    longest = max(len(request.inputs) for request in requests)
    if max_context is not None and longest > max_context:
        raise ScoreError(
            f"Teacher {scorer!r} reads {max_context} tokens; group {group.number} has {longest}:"
            " lower engine.max_context or sampling.max_new_tokens."
        )


def verdicts(group: Group, notes: Sequence[Notes]) -> list[Verdict]:
    """One for each episode, with the notes of its rollouts."""
    in_order = iter(notes)
    return [
        Verdict(notes=tuple(next(in_order) for _ in episode.rollouts)) for episode in group.episodes
    ]


def _teaching(rollout: Rollout, told: TokenLogprobs, *, has_top: bool) -> Teaching:
    return Teaching(
        logprobs=_spread(told.logprobs, rollout),
        top_ids=_spread(told.top_ids, rollout) if has_top else None,
        top_logprobs=_spread(told.top_logprobs, rollout) if has_top else None,
        version=told.version,
    )


def _spread(values: np.ndarray, rollout: Rollout) -> np.ndarray:
    """[sampled, ...] -> [L, ...], with zeros elsewhere."""
    spread = np.zeros((len(rollout.tokens), *values.shape[1:]), values.dtype)
    spread[rollout.mask] = values
    return spread
