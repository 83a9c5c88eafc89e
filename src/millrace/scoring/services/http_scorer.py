"""A scorer that is a service of the user's: JSON with completions in, JSON with scores out.

    POST  {"scorer": "style", "prompt": ..., "completions": [...], "columns": {...}}
    200   {"scores": [0.5, null]}

Promise: a score per completion, finite or null; anything else is asked for again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Group, Task, Verdict
from millrace.scoring.functions.scorer import completion_of
from millrace.scoring.functions.signature import check_rewards
from millrace.scoring.scorer_kind import CallRules, ScorerTools
from millrace.scoring.services.endpoint import Endpoint, check_endpoint, check_texts


@dataclass(frozen=True, kw_only=True)
class Http:
    """The kind of scorer behind `type = "http"`."""

    url: str
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        check_texts(url=self.url)

    @property
    def default_name(self) -> str:
        return "http"

    def rules(self, *, num_workers: int) -> CallRules:
        return CallRules()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_endpoint(self.url, self.headers, scorer=name)
        check_columns(tasks, name=name)

    def make(
        self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools
    ) -> "HttpScorer":
        endpoint = Endpoint(self.url, headers=self.headers, timeout_s=rules.timeout_s, scorer=name)
        return HttpScorer(endpoint, name=name, weight=weight)


class HttpScorer:
    """Runs on the controller's event loop, see endpoint.py."""

    def __init__(self, endpoint: Endpoint, *, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self._endpoint = endpoint

    async def start(self) -> None:
        await self._endpoint.start()

    async def close(self) -> None:
        await self._endpoint.close()

    async def score(self, group: Group) -> list[Verdict]:
        prompt = group.task.prompt
        answer = await self._endpoint.post(
            {
                "scorer": self.name,
                "prompt": prompt,
                "completions": [completion_of(episode, prompt) for episode in group.episodes],
                "columns": group.task.columns,
            }
        )
        return [Verdict(score=score) for score in self._scores(answer, len(group.episodes))]

    def _scores(self, answer: Any, num_episodes: int) -> list[float | None]:
        if not isinstance(answer, dict) or "scores" not in answer:
            raise self._endpoint.unusable('answered without "scores"')
        scores = cast(dict[str, Any], answer)["scores"]
        try:
            return check_rewards(scores, name=self.name, num_completions=num_episodes)
        except ScoreError as error:
            raise self._endpoint.unusable(f'answered with wrong "scores": {error}') from None


def check_columns(tasks: Sequence[Task], *, name: str) -> None:
    """Raise ConfigError for a task that JSON cannot say."""
    for index, task in enumerate(tasks):
        try:
            json.dumps([task.prompt, task.columns], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Scorer {name!r} sends tasks as JSON, and task {index} holds what that cannot say"
                f" ({error}); leave out the column, or make it a number, a text, or a list."
            ) from None
