"""The scorer type "judge": an LLM judge behind an OpenAI-compatible chat completions endpoint.

    POST {url}/chat/completions   {"model", "messages", "temperature", ...}
    200  {"choices": [{"message": {"content": "... {\"score\": 7}"}}]}

Promise: one request per episode. A request with the same content as an earlier one, or as one in
flight, is answered from the cache. A reply without a score is retried. Placeholders of the prompt,
such as {completion}, are replaced once, so a completion cannot insert other columns; {{answer}}
stands for the text {answer}. The user's pattern may take forever to backtrack, so the scorer
processes match it.
"""

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast
from weakref import WeakValueDictionary

from millrace.cluster.messages import ScoreGroup
from millrace.config.section import NonEmptyStr, NonNegativeInt
from millrace.core.errors import ConfigError, ScoreError, WorkerError
from millrace.core.plugins import plugin
from millrace.core.records import Episode, Group, ScorerResult, Task
from millrace.scoring.functions.function_scorer import reply_of
from millrace.scoring.functions.user_function import check_rewards
from millrace.scoring.functions.workers import ScorerWorkers
from millrace.scoring.scorer_type import CallSettings, ScorerContext
from millrace.scoring.services.endpoint import Endpoint, check_endpoint, check_json_columns

ROUTE = "/chat/completions"
MATCH_TIMEOUT_S = 5.0
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
BUILTIN_NAMES = ("prompt", "completion")
MAX_CHARACTERS = 20_000  # read from the end of a reply, where the score is
MAX_OBJECTS = 100  # JSON objects that are searched for a key; a reply may be nothing but braces


@plugin
class Judge:
    url: NonEmptyStr  # with the version: "https://api.example.com/v1"
    model: NonEmptyStr
    prompt: NonEmptyStr
    system: str = ""
    key: str | None = None  # of the score in the JSON of a reply
    pattern: str | None = None  # or a regular expression whose first group is the score
    temperature: float = 0.0
    body: dict[str, Any] = field(default_factory=dict[str, Any])  # more keys of the request
    headers: dict[str, str] = field(default_factory=dict[str, str])
    cache: NonNegativeInt = 10_000  # scores in memory; 0 = no cache
    keep: bool = False  # also store the cache in the run directory

    default_name = "judge"

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return CallSettings()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_endpoint(self.url, self.headers, scorer=name)
        check_template(self.prompt, tasks, scorer=name)
        check_json_columns(tasks, name=name)
        if (self.key is None) == (self.pattern is None):
            raise ConfigError(
                f"Scorer {name!r} does not say where the score is in a reply; set either key, as in"
                " 'score', or pattern, as in 'Score: ([0-9]+)'."
            )
        try:
            has_group = self.pattern is None or re.compile(self.pattern).groups > 0
        except re.error as error:
            raise ConfigError(f"Scorer {name!r} has an invalid pattern: {error}.") from None
        if not has_group:
            raise ConfigError(
                f"Scorer {name!r} has a pattern without a group; put () around the score."
            )

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "JudgeScorer":
        url = self.url.rstrip("/").removesuffix(ROUTE) + ROUTE
        if self.pattern is not None:
            context.functions[_pattern_function(name)] = PatternReader(self.pattern)
        path = context.folder / f"{name}.jsonl" if self.keep else None
        return JudgeScorer(
            name=name,
            weight=weight,
            settings=self,
            endpoint=Endpoint(url, headers=self.headers, timeout_s=calls.timeout_s, scorer=name),
            cache=ScoreCache(self.cache, path=path),
            workers=context.workers,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class JudgeScorer:
    name: str
    weight: float
    settings: Judge
    endpoint: Endpoint
    cache: "ScoreCache"
    workers: ScorerWorkers
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def start(self) -> None:
        self.cache.open()
        await self.endpoint.start()

    async def close(self) -> None:
        await self.endpoint.close()
        self.cache.close()

    async def score(self, group: Group) -> list[ScorerResult]:
        # Sequential, because a call counts as one in flight.
        return [ScorerResult(score=await self._score(group.task, e)) for e in group.episodes]

    async def _score(self, task: Task, episode: Episode) -> float:
        settings = self.settings
        content = fill_template(settings.prompt, task=task, episode=episode)
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": content}],
            "temperature": settings.temperature,
            **settings.body,
        }
        if settings.cache == 0:
            return await self._ask(body)
        # A resumed run may read another score from the same reply.
        key = cache_key({"body": body, "key": settings.key, "pattern": settings.pattern})
        # Equal calls share a lock, no result: if one is cancelled or fails, the next makes its own.
        async with self._locks.setdefault(key, asyncio.Lock()):
            score = self.cache.get(key)
            if score is None:
                score = await self._ask(body)
                self.cache.put(key, score)
            return score

    async def _ask(self, body: Mapping[str, Any]) -> float:
        return await self._parse(await self.endpoint.post(body))

    async def _parse(self, answer: Any) -> float:
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise self.endpoint.unusable("answered without a message")
        key = self.settings.key
        value = await self._match(reply) if key is None else read_key(reply, key)
        try:
            (score,) = check_rewards([value], name=self.name, num_completions=1)
        except ScoreError:
            score = None
        if score is None:
            raise self.endpoint.unusable(f"replied without a score: {reply[-200:]!r}")
        return score

    async def _match(self, reply: str) -> float | None:
        """Match the pattern in a scorer process; None without a match or after a timeout."""
        message = ScoreGroup(
            function=_pattern_function(self.name),
            prompts=[""],
            completions=[reply],
            completion_ids=[[]],
            columns={},
        )
        try:
            scored = await self.workers.call(message, exclusive=True, timeout_s=MATCH_TIMEOUT_S)
        except (TimeoutError, WorkerError):
            return None
        return scored.rewards[0]


def _pattern_function(name: str) -> str:
    """The name under which the scorer processes know the judge's pattern."""
    return f"{name} (pattern)"


class ScoreCache:
    """LRU cache of scores by request digest, optionally stored in a file of the run. The file holds
    no text, only digests. Called from the controller's event loop."""

    def __init__(self, capacity: int, *, path: Path | None = None) -> None:
        """`capacity` bounds the scores in memory, not those in the file."""
        self._capacity = capacity
        self._path = path
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Load the scores that an earlier part of the run stored."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_text() if self._path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        if complete != text:  # the process was killed while it wrote the last line
            self._path.write_text(complete)
        for line in complete.splitlines():
            row = json.loads(line)
            self._add(row["key"], row["score"])
        self._file = self._path.open("a", buffering=1)  # flushes each line

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, key: str) -> float | None:
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: str, score: float) -> None:
        self._add(key, score)
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "score": score}) + "\n")

    def _add(self, key: str, score: float) -> None:
        self._scores[key] = score
        self._scores.move_to_end(key)
        while len(self._scores) > self._capacity:
            self._scores.popitem(last=False)


def cache_key(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def check_template(template: str, tasks: Sequence[Task], *, scorer: str) -> None:
    names = {name for _, name in PLACEHOLDER.findall(template) if name}
    if "completion" not in names:
        raise ConfigError(
            f"Scorer {scorer!r} has a prompt without {{completion}}, so the judge would not see"
            " what it scores; add it."
        )
    for index, task in enumerate(tasks):
        for name in sorted(names.difference(BUILTIN_NAMES, task.columns)):
            raise ConfigError(
                f"Scorer {scorer!r} has {{{name}}} in its prompt, but task {index} has no such"
                f" column; add it to the task, or write {{{{{name}}}}} to mean the text."
            )


def fill_template(template: str, *, task: Task, episode: Episode) -> str:
    prompt = task.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{m['role']}: {_as_text(m.get('content', ''))}" for m in prompt)
    values = {**task.columns, "prompt": prompt, "completion": reply_of(episode)}

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        return f"{{{escaped}}}" if escaped else _as_text(values[name])

    return PLACEHOLDER.sub(value, template)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_key(reply: str, key: str) -> Any:
    """Return the value of `key` in the last JSON object of the reply that has it, or None."""
    reply = reply[-MAX_CHARACTERS:]
    decoder = json.JSONDecoder()
    start = len(reply)
    for _ in range(MAX_OBJECTS):
        start = reply.rfind("{", 0, start)
        if start < 0:
            break
        try:
            found, _ = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            continue
        if key in found:
            return cast(dict[str, Any], found)[key]
    return None


@dataclass(frozen=True)
class PatternReader:
    """A reward function over replies: the number in the first group of the last match."""

    pattern: str

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        return [self._read(reply) for reply in completions]

    def _read(self, reply: str) -> float | None:
        matches = list(re.finditer(self.pattern, reply[-MAX_CHARACTERS:]))
        try:
            return float(matches[-1][1]) if matches else None
        except (TypeError, ValueError):  # the group did not match, or is not a number
            return None
