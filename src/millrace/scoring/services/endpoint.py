"""An HTTP endpoint that takes and returns JSON, and the scorer type "http", the user's own service:

    POST  {"scorer": "style", "prompt": ..., "completions": [...], "columns": {...}}
    200   {"scores": [0.5, null]}

Promise: post() returns parsed JSON or raises. Temporary failures (no connection, timeout, 429, 5xx,
an answer that is not JSON) are TransientScoreErrors; others are not retried. No secret appears in a
message. Redirects are not followed, because they would carry the secrets elsewhere. Runs on the
controller's event loop: a cancelled group ends its request at once.
"""

import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from millrace.config.section import NonEmptyStr
from millrace.core.errors import ConfigError, ScoreError, TransientScoreError, shortened
from millrace.core.plugins import plugin
from millrace.core.records import Group, ScorerResult, Task
from millrace.core.secrets import Secrets, check_headers
from millrace.scoring.functions.function_scorer import completion_of
from millrace.scoring.functions.user_function import check_rewards
from millrace.scoring.scorer_type import CallSettings, ScorerContext

MAX_ANSWER_BYTES = 8 * 2**20
MAX_RETRY_AFTER_S = 600.0
MAX_SHOWN = 200  # characters of an answer in an error


@dataclass(eq=False, repr=False)
class Endpoint:
    url: InitVar[str]
    _: KW_ONLY
    headers: InitVar[Mapping[str, str]]
    timeout_s: float
    scorer: str
    max_answer_bytes: int = MAX_ANSWER_BYTES

    def __post_init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._secrets = Secrets({"url": url, **headers}, owner=f"Scorer {self.scorer!r}")
        self._url = self._secrets.filled(url)
        self._headers = {name: self._secrets.filled(value) for name, value in headers.items()}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),  # ScorerQueue bounds the calls in flight
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, body: Mapping[str, Any]) -> Any:
        assert self._session is not None, "post() needs start()"
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ScoreError(f"Scorer {self.scorer!r} cannot send a task: {error}.") from None
        try:
            async with self._session.post(
                self._url,
                data=data,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                text = await self._text(response)
        except (TimeoutError, aiohttp.ClientError) as error:
            # The str, not the repr: a repr would show the request with its headers.
            message = f"cannot be reached ({type(error).__name__}: {error})"
            if isinstance(error, TimeoutError):
                message = f"gave no answer within {self.timeout_s:g} s"
            raise TransientScoreError(self._message(message), is_down=True) from None
        if not 200 <= response.status < 300:
            message = self._message(f"answered with status {response.status}: {_shown(text)}")
            if response.status == 429 or response.status >= 500:
                wait_s = retry_after_s(response.headers.get("Retry-After"))
                raise TransientScoreError(message, is_down=True, retry_after_s=wait_s)
            raise ScoreError(message)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.unusable(f"did not answer with JSON: {_shown(text)}") from None

    def unusable(self, reason: str) -> TransientScoreError:
        """The error for an answer that cannot be used."""
        return TransientScoreError(self._message(reason))

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > self.max_answer_bytes:
                raise self.unusable(f"answered with more than {self.max_answer_bytes} bytes")
        return data.decode("utf-8", errors="replace")

    def _message(self, problem: str) -> str:
        address = urlsplit(self._url)._replace(query="", fragment="").geturl()  # may hold a secret
        return self._secrets.hidden(f"Scorer {self.scorer!r}: {address} {problem.rstrip('.')}.")


def check_endpoint(url: str, headers: Mapping[str, str], *, scorer: str) -> None:
    """Raise ConfigError for mistakes that can be found before anything is sent."""
    check_headers(headers, owner=f"Scorer {scorer!r}")
    filled = Secrets({"url": url, **headers}, owner=f"Scorer {scorer!r}").filled(url)
    parts = urlsplit(filled)
    try:
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number below 2**16
        is_valid = False
    if not is_valid:
        shown = repr(url) if filled == url else "the value of its environment variable"
        raise ConfigError(f"Scorer {scorer!r} has url = {shown}; write 'http://HOST:PORT/PATH'.")
    if parts.username is not None:
        raise ConfigError(
            f"Scorer {scorer!r} has a user or password in its url; send them as a header, as in"
            " headers = { Authorization = 'env:NAME' }."
        )


def _shown(text: str) -> str:
    return shortened(" ".join(text.split()) or "nothing", MAX_SHOWN)


def retry_after_s(value: str | None) -> float | None:
    """Parse a Retry-After header, which holds seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None


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
    """One finite score or null per completion; any other answer is retried."""

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
        if not isinstance(answer, dict) or "scores" not in answer:
            raise self.endpoint.unusable('answered without "scores"')
        num_episodes, given = len(group.episodes), cast(dict[str, Any], answer)["scores"]
        try:
            scores = check_rewards(given, name=self.name, num_completions=num_episodes)
        except ScoreError as error:
            raise self.endpoint.unusable(f'answered with invalid "scores": {error}') from None
        return [ScorerResult(score=score) for score in scores]


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
