"""Announces published versions over HTTP to engines outside the run.

    POST URL    {"version": 12, "path": "/shared/weights/version_12"}

A 2xx answer means that the engine needs the files no longer; they stay on disk until then.

Promise: a failing URL neither stops the run nor delays its own engines. Each post is tried
`ATTEMPTS` times within the timeout. The first failure of a URL is a warning; all are counted.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from millrace.core.records import WeightUpdate

ATTEMPTS = 3
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class HttpNotifier:
    """A subscriber of the version broadcast; see VersionBroadcaster."""

    urls: Sequence[str]
    _: KW_ONLY
    timeout_s: float  # for all attempts at one version together
    warn: Callable[[str], None]
    retry_s: float = RETRY_S
    num_failed: int = 0  # posts that failed after all attempts
    warned: set[str] = field(default_factory=set[str])  # URLs

    async def receive(self, update: WeightUpdate) -> int:
        """Returns when every URL has answered or failed."""
        body = {"version": update.version, "path": str(Path(update.location).parent)}
        await asyncio.gather(*(self._notify(url, body) for url in self.urls))
        return update.version

    async def _notify(self, url: str, body: dict[str, Any]) -> None:
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout())  # no limits but ours
        try:
            async with asyncio.timeout(self.timeout_s), session:
                await self._post(session, url, body)
        except (OSError, ValueError, aiohttp.ClientError) as error:  # TimeoutError is an OSError
            self.num_failed += 1
            if url not in self.warned:
                self.warned.add(url)
                reason = str(error) or f"no answer in weights.timeout_s = {self.timeout_s:g}"
                self.warn(
                    f"{url} could not be notified of version {body['version']} ({reason}); the run"
                    " continues, and later failures are only counted (notify_failures)."
                )

    async def _post(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with session.post(url, json=body, allow_redirects=False) as answer:
                    if answer.status // 100 != 2:
                        raise ValueError(f"it answered '{answer.status} {answer.reason}'")
                return
            except (OSError, ValueError, aiohttp.ClientError):
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(self.retry_s)
