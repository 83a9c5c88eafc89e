"""Announces published versions over HTTP to engines outside the run.

    POST URL    {"version": 12, "path": "/shared/weights/version_12"}

A 2xx answer means that the engine needs the files no longer; they stay on disk until then.

Promise: a failing URL neither stops the run nor delays its own engines. Each post is tried
`ATTEMPTS` times within the timeout. The first failure of a URL is a warning; all are counted.

Runs on the controller's event loop.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from millrace.core.records import WeightUpdate

ATTEMPTS = 3
RETRY_S = 1.0


class HttpNotifier:
    """A subscriber of the version broadcast; see VersionBroadcaster."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,  # for all attempts at one version together
        warn: Callable[[str], None],
        retry_s: float = RETRY_S,
    ) -> None:
        self.num_failed = 0  # posts that failed after all attempts
        self._urls = urls
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._warn = warn
        self._warned: set[str] = set()  # URLs

    async def receive(self, update: WeightUpdate) -> int:
        """Returns when every URL has answered or failed."""
        await asyncio.gather(*(self._notify(url, update) for url in self._urls))
        return update.version

    async def _notify(self, url: str, update: WeightUpdate) -> None:
        folder = str(Path(update.location).parent)
        body = json.dumps({"version": update.version, "path": folder}).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post_with_retries(url, body)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            self.num_failed += 1
            if url not in self._warned:
                self._warned.add(url)
                reason = str(error) or f"no answer in weights.timeout_s = {self._timeout_s:g}"
                self._warn(
                    f"{url} could not be notified of version {update.version} ({reason}); the run"
                    " continues, and later failures are only counted (notify_failures)."
                )

    async def _post_with_retries(self, url: str, body: bytes) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await _post(url, body)
                return
            except (OSError, ValueError):
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(self._retry_s)


async def _post(url: str, body: bytes) -> None:
    """Returns on a 2xx answer. A raw connection, as a request in a thread cannot be cancelled."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if is_tls else 80), ssl=is_tls or None
    )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = (
        f"POST {target} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    )
    try:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        answer = (await reader.readline()).decode("latin-1").split(maxsplit=1)
    finally:
        writer.close()
    if len(answer) < 2 or not answer[1].startswith("2"):
        raise ValueError(f"it answered {answer[1].strip()!r}" if len(answer) > 1 else "no answer")
