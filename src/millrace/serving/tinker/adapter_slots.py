"""Saved adapters in the engines: a few places for the most recently used ones.

Promise: a place changes only while no request uses it. An adapter that needs a place waits for the
running requests of one other adapter, which gets no further ones there and has at most `max_users`.
However many adapters a tenant uses, others get as many places as it: the next adapter that gets one
is of the tenant that has the fewest. A tenant loses a place that it uses only to an adapter of its
own, or of a tenant that has fewer places. Adapters of one tenant get their places in the order in
which they came. A restarted engine holds the same adapters before it gets requests.

Runs on the server's event loop.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.cluster.messages import LoadAdapter
from millrace.cluster.worker import Worker
from millrace.core.errors import CheckpointError, ConfigError, WorkerError, run_all

LOAD_TIMEOUT_S = 60.0  # of an adapter into an engine


@dataclass(eq=False, slots=True)
class _HeldAdapter:
    """A saved adapter that has a place in the engines, or waits for one."""

    tenant: str
    room: asyncio.Semaphore  # for users
    num_users: int = 0  # requests that use it or wait for its place
    used_s: float = 0.0  # by the last one
    is_closed: bool = False  # it gets no further users
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set by the last one
    place: asyncio.Task[str] = field(init=False)  # the name of the place, when it is loaded


_Change = tuple[str, _HeldAdapter | None]  # a place, and the adapter that it had


class AdapterSlots:
    def __init__(self, names: Sequence[str], *, max_users: int) -> None:
        """`names`: adapters of the engines that may be replaced. `max_users`: requests that use an
        adapter at a time; engines do not run more."""
        self._max_users = max_users
        self._folders: dict[str, Path | None] = dict.fromkeys(names)  # what engines have loaded
        self._loading = {name: asyncio.Lock() for name in names}
        self._workers: dict[str, Worker] = {}  # by the names of their engines
        self._held: dict[Path, _HeldAdapter] = {}  # those that get further users
        # By place, without those that change now; None = nothing was loaded.
        self._placed: dict[str, _HeldAdapter | None] = dict.fromkeys(names)
        self._tenants: dict[str, str] = {}  # by place: whose adapter it has, or will have
        self._waiting: dict[_HeldAdapter, asyncio.Future[_Change]] = {}  # the oldest first
        self._turns: dict[str, int] = {}  # by tenant: the number of its last change
        self._numbers = itertools.count(1)  # of changes

    async def attach(self, engine: str, worker: Worker) -> None:
        """An engine has started."""
        self._workers[engine] = worker
        for name, lock in self._loading.items():
            async with lock:  # otherwise it might overwrite an adapter that is loaded meanwhile
                if (folder := self._folders[name]) is not None:
                    with contextlib.suppress(CheckpointError, ConfigError):  # it was removed
                        await _load_into(worker, name, folder)

    @contextlib.asynccontextmanager
    async def holding(self, folder: Path, *, tenant: str) -> AsyncIterator[str]:
        """The name of the adapter in the engines, inside the context."""
        held = await self._admit(folder, tenant)
        try:
            yield await asyncio.shield(held.place)
        finally:
            held.num_users -= 1
            held.room.release()
            if not held.num_users:
                held.left.set()
                self._choose_places()  # it may now be replaced

    async def _admit(self, folder: Path, tenant: str) -> _HeldAdapter:
        """Add a user to the adapter."""
        while True:
            held = self._held.get(folder)
            if held is None:
                held = _HeldAdapter(tenant, asyncio.Semaphore(self._max_users))
                self._held[folder] = held
                held.place = asyncio.create_task(self._load(folder, held))
            await held.room.acquire()
            if not held.is_closed:
                held.num_users += 1
                held.used_s = time.monotonic()
                return held
            held.room.release()  # it was replaced while this request waited for room

    def forget(self, folder: Path) -> None:
        """The adapter in this folder has changed or is gone. Running requests keep the old one."""
        self._held.pop(folder, None)

    async def _load(self, folder: Path, held: _HeldAdapter) -> str:
        """Returns the name of the place that the adapter got."""
        chosen = self._waiting[held] = asyncio.get_running_loop().create_future()
        self._choose_places()
        name, old = await chosen
        if old is not None and old.num_users:
            old.left.clear()
            await old.left.wait()
        try:
            async with self._loading[name]:
                self._folders[name] = folder  # an engine that starts now loads it, too
                await run_all(_load_into(w, name, folder) for w in self._workers.values())
            self._placed[name] = held
        except BaseException:  # cancelled, or refused: the folder was removed
            self._folders[name] = self._placed[name] = None
            del self._tenants[name]
            self._close(held)
            raise
        finally:
            self._choose_places()
        return name

    def _choose_places(self) -> None:
        """Give adapters that wait the places that they may take now."""
        while found := self._next_change():
            held, name = found
            old = self._placed.pop(name)
            if old is not None:
                self._close(old)
            self._tenants[name] = held.tenant
            self._turns[held.tenant] = next(self._numbers)
            if not (chosen := self._waiting.pop(held)).done():  # otherwise the server stops
                chosen.set_result((name, old))

    def _next_change(self) -> tuple[_HeldAdapter, str] | None:
        """An adapter that waits, and the place that it gets."""
        counts = Counter(self._tenants.values())
        oldest: dict[str, _HeldAdapter] = {}
        for held in self._waiting:
            oldest.setdefault(held.tenant, held)
        for tenant in sorted(oldest, key=lambda each: (counts[each], self._turns.get(each, 0))):
            ranked = [
                (rank, name)
                for name, old in self._placed.items()
                if (rank := _rank(old, tenant, counts)) is not None
            ]
            if ranked:
                return oldest[tenant], min(ranked)[1]
        return None

    def _close(self, held: _HeldAdapter) -> None:
        """Let it get no further users."""
        held.is_closed = True
        self._held = {folder: own for folder, own in self._held.items() if own is not held}


def _rank(
    old: _HeldAdapter | None, tenant: str, counts: Mapping[str, int]
) -> tuple[float, float, float] | None:
    """The least is the place that an adapter of the tenant takes; None if it may not take this one.
    `counts`: the places of each tenant."""
    if old is None:
        return 0, 0, 0
    num_places, is_own = counts[old.tenant], old.tenant == tenant
    if not old.num_users:
        return 1, -num_places, old.used_s
    if is_own or num_places > counts[tenant]:
        return 2, -num_places - 0.5 * is_own, old.used_s
    return None


async def _load_into(worker: Worker, name: str, folder: Path) -> None:
    message = LoadAdapter(name=name, folder=str(folder))
    with contextlib.suppress(WorkerError):  # a dead engine is restarted and attached
        await worker.call(message, timeout_s=LOAD_TIMEOUT_S, kill_on_timeout=True)
