"""Delivers published versions of a policy to everything that follows them: rollout engines,
self-teachers, pinned evaluation engines and, over HTTP, external engines.

Promise: no subscriber waits for another. Each receives one version at a time; while it is busy, a
newer version replaces the one that waits for it. A version's memory is released at the trainer
when the last subscriber is done with it. If the trainer dies mid-transfer, the subscriber receives
the newest version of the trainer that replaces it.

Runs on the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from millrace.core.errors import WeightError
from millrace.core.records import DEFAULT_POLICY, WeightUpdate

Receive = Callable[[WeightUpdate], Awaitable[int]]
"""Returns the version that the subscriber now holds, once it needs the update's bytes no longer."""
Wants = Callable[[int], bool]
OnVersion = Callable[[int], None]
ATTEMPTS = 3
RETRY_S = 1.0


class VersionSource(Protocol):
    async def release(self, update: WeightUpdate) -> None: ...

    async def is_lost(self, update: WeightUpdate) -> bool: ...

    async def borrow(self, policy: str) -> WeightUpdate:
        """The newest version of a policy; readable until it is released. Waits while the trainer
        restarts."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Shared:
    """An update and the number of subscribers that may still read it."""

    update: WeightUpdate
    num_readers: int


class Subscription:
    """One subscriber's place in the broadcast; made by VersionBroadcaster.subscribe()."""

    def __init__(
        self, receive: Receive, *, wants: Wants, on_version: OnVersion, version: int
    ) -> None:
        self.receive = receive
        self.wants = wants
        self.on_version = on_version
        self.version = version  # held by the subscriber
        self.offered = version  # newest version that was offered to it
        self._pending: asyncio.Queue[_Shared] = asyncio.Queue(maxsize=1)
        self._is_busy = False
        self._received = asyncio.Event()  # set and replaced with each version that it has received

    async def reached(self, version: int) -> None:
        """Wait until the subscriber holds at least this version."""
        while self.version < version:
            await self._received.wait()

    async def idle(self) -> None:
        """Wait until the subscriber is done with everything that was offered to it."""
        while self._is_busy or not self._pending.empty():
            await self._received.wait()

    def offer(self, shared: _Shared) -> _Shared | None:
        """Returns the version that it replaces, if one was pending."""
        superseded = None if self._pending.empty() else self._pending.get_nowait()
        self._pending.put_nowait(shared)
        self.offered = shared.update.version
        return superseded

    async def take(self) -> _Shared:
        taken = await self._pending.get()
        self._is_busy = True
        return taken

    def finish(self, version: int) -> None:
        """The subscriber holds `version` and needs the bytes of no update."""
        self.version = version
        self._is_busy = False
        self.on_version(version)
        self._received.set()
        self._received = asyncio.Event()


class VersionBroadcaster:
    def __init__(self, *, version: int, policy: str = DEFAULT_POLICY) -> None:
        """`version`: what every subscriber holds when the run starts."""
        self._policy = policy
        self._version = version
        self.newest = version  # that was published
        self._subscriptions: list[Subscription] = []
        self._unread: asyncio.Queue[WeightUpdate] = asyncio.Queue()  # to be released

    def subscribe(
        self,
        receive: Receive,
        *,
        wants: Wants = lambda _: True,
        on_version: OnVersion = lambda _: None,
    ) -> Subscription:
        """Add a subscriber, before run(). `wants` may refuse a version when it is published;
        `on_version` is called with each version that the subscriber has received."""
        added = Subscription(receive, wants=wants, on_version=on_version, version=self._version)
        self._subscriptions.append(added)
        return added

    def publish(self, update: WeightUpdate) -> None:
        """Offer a version to every subscriber that was not offered it before and wants it."""
        assert update.policy == self._policy, "each policy has its own broadcaster"
        self.newest = max(self.newest, update.version)
        shared = _Shared(update=update, num_readers=1)  # until all have been offered it
        for subscription in self._subscriptions:
            if update.version > subscription.offered and subscription.wants(update.version):
                shared.num_readers += 1
                if (superseded := subscription.offer(shared)) is not None:
                    self._done(superseded)
        self._done(shared)

    async def run(self, source: VersionSource) -> None:
        """Deliver versions until cancelled; raises WeightError if a subscriber refuses one."""
        async with asyncio.TaskGroup() as tasks:
            for subscription in self._subscriptions:
                tasks.create_task(self._deliver(subscription, source))
            while True:
                # One task each: the trainer answers a release only between two steps.
                tasks.create_task(source.release(await self._unread.get()))

    async def _deliver(self, subscription: Subscription, source: VersionSource) -> None:
        while True:
            shared = await subscription.take()
            version = subscription.version
            if shared.update.version > version:
                version = await self._receive(subscription, shared, source)
            else:  # a restarted trainer's newest version has overtaken it
                self._done(shared)
            subscription.finish(version)

    async def _receive(
        self, subscription: Subscription, shared: _Shared, source: VersionSource
    ) -> int:
        while True:
            try:
                return await subscription.receive(shared.update)
            except WeightError:
                if not await source.is_lost(shared.update):
                    raise
            finally:
                self._done(shared)
            shared = _Shared(update=await source.borrow(self._policy), num_readers=1)

    def _done(self, shared: _Shared) -> None:
        shared.num_readers -= 1
        if shared.num_readers == 0:
            self._unread.put_nowait(shared.update)


@dataclass(slots=True, eq=False)
class HttpNotifier:
    """A subscriber that announces versions over HTTP to engines outside the run.

        POST URL    {"version": 12, "path": "/shared/weights/version_12"}

    A 2xx answer means that the engine needs the files no longer; they stay on disk until then.
    Promise: a failing URL neither stops the run nor delays its own engines. Each post is tried
    ATTEMPTS times within the timeout. The first failure of a URL is a warning; all are counted.
    """

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
        reason = f"no answer in {self.timeout_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s), session:
                for attempt in range(ATTEMPTS):
                    await asyncio.sleep(self.retry_s if attempt else 0.0)
                    try:
                        async with session.post(url, json=body, allow_redirects=False) as answer:
                            if answer.status // 100 == 2:
                                return
                            reason = f"it answered '{answer.status} {answer.reason}'"
                    except (OSError, ValueError, aiohttp.ClientError) as error:
                        reason = str(error) or reason
        self.num_failed += 1
        if url not in self.warned:
            self.warned.add(url)
            self.warn(
                f"{url} could not be notified of version {body['version']} ({reason}); the run"
                " continues, and later failures are only counted (notify_failures)."
            )
