"""A language model that judges, behind any endpoint with OpenAI's chat completions.

    POST {url}/chat/completions   {"model", "messages", "temperature", ...}
    200  {"choices": [{"message": {"content": "... {\"score\": 7}"}}]}

Promise: one request per episode and content: what was judged before is remembered. A reply without
a score is asked for again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Episode, Group, Task, Verdict
from millrace.scoring.functions.signature import check_rewards
from millrace.scoring.scorer_kind import CallRules, ScorerTools
from millrace.scoring.services.endpoint import Endpoint, check_endpoint, check_texts
from millrace.scoring.services.http_scorer import check_columns
from millrace.scoring.services.judge_text import (
    PatternReader,
    check_template,
    fill_template,
    read_key,
    read_pattern,
)
from millrace.scoring.services.score_cache import ScoreCache, key_of

ROUTE = "/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The kind of scorer behind `type = "judge"`."""

    url: str  # with the version: "https://api.example.com/v1"
    model: str
    prompt: str
    system: str = ""
    key: str | None = None  # of the JSON in a reply; or
    pattern: str | None = None  # whose first group is the score
    temperature: float = 0.0
    body: dict[str, Any] = field(default_factory=dict[str, Any])  # further keys of the request
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cache: int = 10_000  # scores in memory; 0 = none
    keep: bool = False  # the cache in the run directory, too

    def __post_init__(self) -> None:
        check_texts(url=self.url, model=self.model, prompt=self.prompt, system=self.system)
        if type(self.cache) is not int or self.cache < 0:
            raise ValueError(f"cache = {self.cache!r} must be an integer, 0 or more")

    @property
    def default_name(self) -> str:
        return "judge"

    def rules(self, *, num_workers: int) -> CallRules:
        return CallRules()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_endpoint(self.url, self.headers, scorer=name)
        check_template(self.prompt, tasks, scorer=name)
        check_columns(tasks, name=name)
        if (self.key is None) == (self.pattern is None):
            raise ConfigError(
                f"Scorer {name!r} must know where its score stands in a reply; set either key, as"
                " in 'score', or pattern, as in 'Score: ([0-9]+)'."
            )
        try:
            has_group = self.pattern is None or re.compile(self.pattern).groups > 0
        except re.error as error:
            raise ConfigError(f"Scorer {name!r} has a wrong pattern: {error}.") from None
        if not has_group:
            raise ConfigError(f"Scorer {name!r} has a pattern without a group; put () around it.")

    def make(
        self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools
    ) -> "JudgeScorer":
        url = self.url.rstrip("/").removesuffix(ROUTE) + ROUTE
        if self.pattern is not None:
            tools.functions[_reader(name)] = PatternReader(self.pattern)
        return JudgeScorer(
            self,
            name=name,
            weight=weight,
            rules=rules,
            endpoint=Endpoint(url, headers=self.headers, timeout_s=rules.timeout_s, scorer=name),
            cache=ScoreCache(
                self.cache, path=tools.folder / f"{name}.jsonl" if self.keep else None
            ),
            tools=tools,
        )


class JudgeScorer:
    """Runs on the controller's event loop, see endpoint.py."""

    def __init__(
        self,
        settings: Judge,
        *,
        name: str,
        weight: float,
        rules: CallRules,
        endpoint: Endpoint,
        cache: ScoreCache,
        tools: ScorerTools,
    ) -> None:
        self.name = name
        self.weight = weight
        self._settings = settings
        self._rules = rules
        self._endpoint = endpoint
        self._cache = cache
        self._workers = tools.workers

    async def start(self) -> None:
        self._cache.open()
        await self._endpoint.start()

    async def close(self) -> None:
        await self._endpoint.close()
        self._cache.close()

    async def score(self, group: Group) -> list[Verdict]:
        # One after the other: alike completions of a group are then asked about once.
        return [Verdict(score=await self._score(group.task, episode)) for episode in group.episodes]

    async def _score(self, task: Task, episode: Episode) -> float:
        body = self._request(fill_template(self._settings.prompt, task=task, episode=episode))
        key = key_of(body)
        score = self._cache.get(key)
        if score is None:
            reply = self._reply(await self._endpoint.post(body))
            score = await self._read(reply)
            self._cache.put(key, score)
        return score

    def _request(self, content: str) -> dict[str, Any]:
        settings = self._settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        return {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": content}],
            "temperature": settings.temperature,
            **settings.body,
        }

    def _reply(self, answer: Any) -> str:
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise self._endpoint.unusable("answered without a message")
        return reply

    async def _read(self, reply: str) -> float:
        if self._settings.key is not None:
            value = read_key(reply, self._settings.key)
        else:
            value = await read_pattern(
                reply,
                function=_reader(self.name),
                workers=self._workers,
                priority=self._rules.priority,
            )
        try:
            (score,) = check_rewards([value], name=self.name, num_completions=1)
        except ScoreError:
            score = None
        if score is None:
            raise self._endpoint.unusable(f"replied without a score: {reply[-200:]!r}")
        return score


def _reader(name: str) -> str:
    """What the scorer processes call the reading of its replies."""
    return f"{name} (pattern)"
