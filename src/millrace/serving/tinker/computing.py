"""Where the training API computes: one thread that trains, and adapters in the engines.

Runs on the server's event loop, apart from the thread.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.cluster.messages import LoadAdapter
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.core.errors import CheckpointError, ConfigError, WorkerError, run_all
from millrace.serving.fair_queue import FairQueue
from millrace.training.adapters.requests import PASS_TOKENS, AdapterPass, PassResult

if TYPE_CHECKING:
    from millrace.training.adapters.adapter_set import AdapterSet

LOAD_TIMEOUT_S = 60.0  # of an adapter into an engine
_WAIT_SHARE = 0.1  # of the duration of a pass, that the next one waits for its models
_POLL_S = 0.001
T = TypeVar("T")


class TrainingThread:
    """The adapters in training. Tenants take turns by the tokens that they have used.

    Passes whose turn comes while the thread is busy are computed together. Their tokens are bounded
    by those of one forward pass, apart from the last of them. A pass begins after the steps that
    wait, and waits briefly for the models of the last pass: otherwise tenants would divide into
    cohorts, each of which waits for the passes of the others.
    """

    def __init__(self, adapters: "AdapterSet", thread: ThreadPoolExecutor) -> None:
        self.max_context = adapters.max_context
        self.busy_s = 0.0  # that all passes have taken
        self._adapters, self._thread = adapters, thread
        self._queue = FairQueue(PASS_TOKENS, separates_clients=False)
        self._ready: deque[tuple[AdapterPass, Future[PassResult]]] = deque()
        self._last_models: set[str] = set()  # of the last pass
        self._last_s = 0.0  # that it took

    @staticmethod
    async def start(config: RunConfig) -> "TrainingThread":
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        loop = asyncio.get_running_loop()
        return TrainingThread(await loop.run_in_executor(thread, _load, config), thread)

    @property
    def num_models(self) -> int:
        return len(self._adapters.owned)

    async def run(self, tenant: str, num_tokens: int, work: Callable[["AdapterSet"], T]) -> T:
        async with self._queue.turn(tenant, num_tokens, num_places=PASS_TOKENS):
            return await self.run_next(work)

    async def run_next(self, work: Callable[["AdapterSet"], T]) -> T:
        """Without waiting for a turn: brief work that follows a pass."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._adapters)

    async def compute(self, tenant: str, one: AdapterPass) -> PassResult:
        """At most one pass of a model waits here at a time."""
        size = one.num_tokens  # the places of the queue are tokens of one forward pass
        async with self._queue.turn(tenant, size, num_places=size):
            result: Future[PassResult] = Future()
            self._ready.append((one, result))
            # Not at once: other passes may have got their turn at the same time.
            asyncio.get_running_loop().call_soon(self._thread.submit, self._compute_ready)
            return await asyncio.wrap_future(result)

    def _compute_ready(self) -> None:
        """Runs in the thread. The first of several calls takes the passes of all of them."""
        if not self._ready:
            return
        began_s = time.monotonic()
        while self._is_early() and time.monotonic() < began_s + _WAIT_SHARE * self._last_s:
            time.sleep(_POLL_S)
        ready = [self._ready.popleft() for _ in range(len(self._ready))]
        self._last_models = {one.model_id for one, _ in ready}
        ready = [(one, result) for one, result in ready if result.set_running_or_notify_cancel()]
        try:
            outcomes: list[Any] = [*self._adapters.compute([one for one, _ in ready])]
        except BaseException as error:  # noqa: BLE001 - given to the callers
            outcomes = [error] * len(ready)
        self._last_s = time.monotonic() - began_s
        self.busy_s += self._last_s
        for (_, result), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

    def _is_early(self) -> bool:
        """Whether a model of the last pass has no pass yet."""
        return not self._last_models <= {one.model_id for one, _ in [*self._ready]}


def _load(config: RunConfig) -> "AdapterSet":
    from millrace.models.attention.packed import PACKED
    from millrace.models.devices import resolve_device, resolve_dtype, use_threads
    from millrace.models.directory import context_length
    from millrace.models.loading import load_model
    from millrace.training.adapters.adapter_set import AdapterSet

    use_threads(config.cluster.threads or 1)
    device, path = resolve_device(config.placement.engine(0)), config.model.path
    trusts = config.model.trust_remote_code
    dtype, wanted = resolve_dtype(config.engine.dtype, device), config.engine.max_context
    setting = "--engine.max_context"
    context = context_length(path, wanted=wanted, setting=setting, trust_remote_code=trusts)
    model = load_model(path, dtype=dtype, device=device, attention=PACKED, trust_remote_code=trusts)
    return AdapterSet(model, path=path, max_context=context)


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
    """Saved adapters in the engines: a few places for the most recently used ones.

    Promise: a place changes only while no request uses it. An adapter that needs a place waits for
    the running requests of one other adapter, which gets no further ones there. Adapters get their
    places in the order in which they came. A restarted engine holds the same adapters before it
    gets requests.
    """

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
