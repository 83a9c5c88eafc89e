"""The update that waits to be told of, of which there is one: a newer one supersedes it.

Used on the controller's event loop, by one that puts and one that takes.

Tells engines that are not ours, over HTTP, that a version lies on the disk.

    POST URL    {"version": 12, "path": "/shared/weights/version_12"}

Any 2xx answer means that the engine does not need the files any more: they stay until then.

Promise: nothing here stops a run or keeps its own engines waiting. A URL that does not answer in
time, after a few attempts, is a warning the first time and counted every time. One version is told
at a time; of those that wait, only the newest is.

Runs on the controller's event loop.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from millrace.core.weight_update import WeightUpdate


class Newest:
    def __init__(self) -> None:
        self._waiting: WeightUpdate | None = None
        self._arrived = asyncio.Event()

    def put(self, update: WeightUpdate) -> WeightUpdate | None:
        """Returns the one that still waited, if one did; nobody will take that."""
        superseded, self._waiting = self._waiting, update
        self._arrived.set()
        return superseded

    async def take(self) -> WeightUpdate:
        """Waits until there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        update, self._waiting = self._waiting, None
        assert update is not None
        return update


ATTEMPTS = 3
RETRY_S = 1.0


class Notifier:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,  # for all attempts at one version together
        warn: Callable[[str], None],
        retry_s: float = RETRY_S,
    ) -> None:
        self.num_failed = 0  # times that a URL was given up for a version
        self._urls = urls
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._warn = warn
        self._warned: set[str] = set()  # URLs
        self._newest = Newest()
        self._needed: dict[int, asyncio.Future[None]] = {}  # by version; done = not any more

    def submit(self, update: WeightUpdate) -> None:
        """Called when a version is on the disk; replaces one that still waits."""
        if not self._urls:
            return
        self._needed[update.version] = asyncio.get_running_loop().create_future()
        if (superseded := self._newest.put(update)) is not None:
            self._needed.pop(superseded.version).set_result(None)

    async def run(self) -> None:
        """Tell for ever; ends by cancellation."""
        while True:
            update = await self._newest.take()
            await asyncio.gather(*(self._tell(url, update) for url in self._urls))
            self._needed.pop(update.version).set_result(None)

    async def done_with(self, version: int) -> None:
        """Until no engine elsewhere may need the files of this version."""
        if version in self._needed:
            await asyncio.shield(self._needed[version])

    async def finish(self) -> None:
        """Until all that was submitted is told, given up or superseded."""
        while self._needed:
            await self.done_with(next(iter(self._needed)))

    async def _tell(self, url: str, update: WeightUpdate) -> None:
        folder = str(Path(update.location).parent)
        body = json.dumps({"version": update.version, "path": folder}).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post_patiently(url, body)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            self.num_failed += 1
            if url not in self._warned:
                self._warned.add(url)
                reason = str(error) or f"no answer in weights.timeout_s = {self._timeout_s:g}"
                self._warn(
                    f"{url} could not be told of version {update.version} ({reason}); the run goes"
                    " on, and later failures are only counted (notify_failures)."
                )

    async def _post_patiently(self, url: str, body: bytes) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await _post(url, body)
                return
            except (OSError, ValueError):
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(self._retry_s)


async def _post(url: str, body: bytes) -> None:
    """Returns on a 2xx answer. By hand, because a request in a thread could not be cancelled."""
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
