"""The scorer type "http": the user's own service, JSON with completions in, JSON with scores out.

    POST  {"scorer": "style", "prompt": ..., "completions": [...], "columns": {...}}
    200   {"scores": [0.5, null]}

Promise: one finite score or null per completion; any other answer is retried.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from millrace.config.section import NonEmptyStr
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.plugins import plugin
from millrace.core.records import Group, ScorerResult, Task
from millrace.scoring.functions.function_scorer import completion_of
from millrace.scoring.functions.signature import check_rewards
from millrace.scoring.scorer_type import CallSettings, ScorerContext
from millrace.scoring.services.endpoint import Endpoint, check_endpoint


@plugin
class Http:
    url: NonEmptyStr
    headers: dict[str, str] = field(default_factory=dict[str, str])

    default_name = "http"

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return CallSettings()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_endpoint(self.url, self.headers, scorer=name)
        check_json_columns(tasks, name=name)

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "HttpScorer":
        endpoint = Endpoint(self.url, headers=self.headers, timeout_s=calls.timeout_s, scorer=name)
        return HttpScorer(name=name, weight=weight, endpoint=endpoint)


@dataclass(kw_only=True, slots=True, eq=False)
class HttpScorer:
    name: str
    weight: float
    endpoint: Endpoint

    async def start(self) -> None:
        await self.endpoint.start()

    async def close(self) -> None:
        await self.endpoint.close()

    async def score(self, group: Group) -> list[ScorerResult]:
        prompt = group.task.prompt
        answer = await self.endpoint.post(
            {
                "scorer": self.name,
                "prompt": prompt,
                "completions": [completion_of(episode, prompt) for episode in group.episodes],
                "columns": group.task.columns,
            }
        )
        return [ScorerResult(score=score) for score in self._scores(answer, len(group.episodes))]

    def _scores(self, answer: Any, num_episodes: int) -> list[float | None]:
        if not isinstance(answer, dict) or "scores" not in answer:
            raise self.endpoint.unusable('answered without "scores"')
        scores = cast(dict[str, Any], answer)["scores"]
        try:
            return check_rewards(scores, name=self.name, num_completions=num_episodes)
        except ScoreError as error:
            raise self.endpoint.unusable(f'answered with invalid "scores": {error}') from None


def check_json_columns(tasks: Sequence[Task], *, name: str) -> None:
    """Raise ConfigError for a task that cannot be sent as JSON."""
    for index, task in enumerate(tasks):
        try:
            json.dumps([task.prompt, task.columns], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Scorer {name!r} sends tasks as JSON, but task {index} cannot be written as JSON"
                f" ({error}); remove the column, or make it a number, a string or a list."
            ) from None
