"""Saved adapters in the engines: a few places for the most recently used ones.

Promise: a place changes only while no request uses it. An adapter that needs a place waits for the
running requests of one other adapter, which gets no further ones there. Adapters get their places
in the order in which they came. A restarted engine holds the same adapters before it gets requests.

Runs on the server's event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.cluster.messages import LoadAdapter
from millrace.cluster.worker import Worker
from millrace.core.errors import CheckpointError, ConfigError, WorkerError, run_all

LOAD_TIMEOUT_S = 60.0  # of an adapter into an engine


@dataclass(eq=False, slots=True)
class _HeldAdapter:
    """A saved adapter that has a place in the engines, or waits for one."""

    num_users: int = 0  # requests that use it or wait for it
    used_s: float = 0.0  # by the last one
    left: asyncio.Event = field(default_factory=asyncio.Event)  # set by the last one
    place: asyncio.Task[str] = field(init=False)  # the name of the place, when it is loaded

    @property
    def importance(self) -> tuple[bool, float]:
        return self.num_users > 0, self.used_s


class AdapterSlots:
    def __init__(self, names: Sequence[str]) -> None:
        """`names`: adapters of the engines that may be replaced."""
        self._folders: dict[str, Path | None] = dict.fromkeys(names)  # what engines have loaded
        self._loading = {name: asyncio.Lock() for name in names}
        self._workers: dict[str, Worker] = {}  # by the names of their engines
        self._held: dict[Path, _HeldAdapter] = {}  # those that get further users
        self._placed = {name: _HeldAdapter() for name in names}  # without places that change now
        self._changes = asyncio.Semaphore(len(names))  # one for each place, in order of arrival

    async def attach(self, engine: str, worker: Worker) -> None:
        """An engine has started."""
        self._workers[engine] = worker
        for name, lock in self._loading.items():
            async with lock:  # otherwise it might overwrite an adapter that is loaded meanwhile
                if (folder := self._folders[name]) is not None:
                    with contextlib.suppress(CheckpointError, ConfigError):  # it was removed
                        await _load_into(worker, name, folder)

    @contextlib.asynccontextmanager
    async def holding(self, folder: Path) -> AsyncIterator[str]:
        """The name of the adapter in the engines, inside the context."""
        held = self._held.get(folder)
        if held is None:
            held = self._held[folder] = _HeldAdapter()
            held.place = asyncio.create_task(self._replace(folder, held))
        held.num_users += 1
        held.used_s = time.monotonic()
        try:
            yield await asyncio.shield(held.place)
        finally:
            held.num_users -= 1
            if not held.num_users:
                held.left.set()

    def forget(self, folder: Path) -> None:
        """The adapter in this folder has changed or is gone. Running requests keep the old one."""
        self._held.pop(folder, None)

    async def _replace(self, folder: Path, held: _HeldAdapter) -> str:
        """Returns the name of the place that the adapter got: that of an idle one if possible."""
        async with self._changes:
            name = min(self._placed, key=lambda name: self._placed[name].importance)
            old = self._placed.pop(name)
            self._close(old)
            if old.num_users:
                old.left.clear()
                await old.left.wait()
            try:
                async with self._loading[name]:
                    self._folders[name] = folder  # an engine that starts now loads it, too
                    await run_all(_load_into(w, name, folder) for w in self._workers.values())
            except BaseException:  # cancelled, or refused: the folder was removed
                self._folders[name] = None
                self._close(held)
                raise
            finally:
                self._placed[name] = held
            return name

    def _close(self, held: _HeldAdapter) -> None:
        """Let it get no further users."""
        self._held = {folder: own for folder, own in self._held.items() if own is not held}


async def _load_into(worker: Worker, name: str, folder: Path) -> None:
    message = LoadAdapter(name=name, folder=str(folder))
    with contextlib.suppress(WorkerError):  # a dead engine is restarted and attached
        await worker.call(message, timeout_s=LOAD_TIMEOUT_S, kill_on_timeout=True)
