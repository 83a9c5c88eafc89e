"""One HTTP endpoint that takes JSON and answers with JSON: a session, and what its faults mean.

Promise: post() returns parsed JSON or raises one sentence. What may pass (no connection, no answer
in time, 429, 5xx, an answer that is no JSON) is a TransientScoreError, the rest is not tried again.
No secret is in a sentence. Redirects are not followed: they would take the secrets elsewhere.

Runs on the controller's event loop: it is I/O and none of the user's code, so it needs no process,
and a group that is given up ends its request at once.
"""

import email.utils
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp

from millrace.core.errors import ConfigError, ScoreError, TransientScoreError
from millrace.core.secrets import Secrets, check_headers

MAX_ANSWER_BYTES = 8 * 2**20
MAX_RETRY_AFTER_S = 600.0
SHOWN = 200  # characters of an answer in an error


class Endpoint:
    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        scorer: str,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._secrets = Secrets({"url": url, **headers}, owner=f"Scorer {scorer!r}")
        self._url = self._secrets.filled(url)
        self._headers = {name: self._secrets.filled(value) for name, value in headers.items()}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=0),  # the desk bounds the calls in flight
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, body: Mapping[str, Any]) -> Any:
        assert self._session is not None, "started with the run"
        data = self._encoded(body)
        try:
            async with self._session.post(
                self._url,
                data=data,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                text = await self._text(response)
        except TimeoutError:
            message = f"gave no answer within {self._timeout_s:g} s"
            raise TransientScoreError(self._sentence(message), is_down=True) from None
        except aiohttp.ClientError as error:
            # Its repr would show the request, and with that the headers.
            message = f"cannot be reached ({type(error).__name__}: {error})"
            raise TransientScoreError(self._sentence(message), is_down=True) from None
        if not 200 <= response.status < 300:
            raise self._refused(response, text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.unusable(f"answered no JSON: {_shown(text)}") from None

    def unusable(self, reason: str) -> TransientScoreError:
        """An answer that is JSON, and still of no use."""
        return TransientScoreError(self._sentence(reason))

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > self._max_answer_bytes:
                raise self.unusable(f"answered with more than {self._max_answer_bytes} bytes")
        return data.decode("utf-8", errors="replace")

    def _refused(self, response: aiohttp.ClientResponse, text: str) -> ScoreError:
        words = self._sentence(f"answered with status {response.status}: {_shown(text)}")
        if response.status == 429 or response.status >= 500:
            wait_s = retry_after_s(response.headers.get("Retry-After"))
            return TransientScoreError(words, is_down=True, retry_after_s=wait_s)
        return ScoreError(words)

    def _encoded(self, body: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ScoreError(f"Scorer {self._scorer!r} cannot send a task: {error}.") from None

    def _sentence(self, words: str) -> str:
        words = words.rstrip(".")
        return self._secrets.hidden(f"Scorer {self._scorer!r}: {_place(self._url)} {words}.")


def check_texts(**settings: object) -> None:
    for name, value in settings.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} = {value!r} must be a text")


def check_endpoint(url: str, headers: Mapping[str, str], *, scorer: str) -> None:
    """Raise ConfigError for what can be known to be wrong before anything is sent."""
    check_headers(headers, owner=f"Scorer {scorer!r}")
    filled = Secrets({"url": url, **headers}, owner=f"Scorer {scorer!r}").filled(url)
    parts = urlsplit(filled)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
        shown = url if filled == url else "what its variable holds"
        raise ConfigError(f"Scorer {scorer!r} has url = {shown!r}; write 'http://HOST:PORT/PATH'.")
    if parts.username is not None:
        raise ConfigError(
            f"Scorer {scorer!r} has a user or password in its url; send them as a header, as in"
            " headers = { Authorization = 'env:NAME' }."
        )


def _has_port(parts: SplitResult) -> bool:
    """A number, or none at all."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _place(url: str) -> str:
    """Where it is; what follows a '?' may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _shown(text: str) -> str:
    words = " ".join(text.split()) or "nothing"
    return words if len(words) <= SHOWN else f"{words[: SHOWN - 3]}..."


def retry_after_s(value: str | None) -> float | None:
    """The header holds seconds or a date."""
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
