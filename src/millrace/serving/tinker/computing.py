"""The thread in which the training API computes. Runs on the server's event loop, apart from it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.config import RunConfig
from millrace.serving.fair_queue import FairQueue
from millrace.training.adapters.requests import PASS_TOKENS, AdapterPass, PassResult

if TYPE_CHECKING:
    from millrace.training.adapters.adapter_set import AdapterSet

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
        self._brief: deque[tuple[Callable[[AdapterSet], Any], Future[Any]]] = deque()
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
        """Run brief work that follows a pass without waiting for a turn, before the next pass."""
        result: Future[T] = Future()
        self._brief.append((work, result))
        self._thread.submit(self._run_brief)
        return await asyncio.wrap_future(result)

    async def compute(self, tenant: str, one: AdapterPass) -> PassResult:
        """At most one pass of a model waits here at a time."""
        size = one.num_tokens  # the places of the queue are tokens of one forward pass
        async with self._queue.turn(tenant, size, num_places=size):
            result: Future[PassResult] = Future()
            self._ready.append((one, result))
            # Not at once: other passes may have got their turn at the same time.
            asyncio.get_running_loop().call_soon(self._thread.submit, self._compute_ready)
            return await asyncio.wrap_future(result)

    def _run_brief(self) -> None:
        """Runs in the thread."""
        while self._brief:
            work, result = self._brief.popleft()
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work(self._adapters))
                except BaseException as error:  # noqa: BLE001 - given to the caller
                    result.set_exception(error)

    def _compute_ready(self) -> None:
        """Runs in the thread. The first of several calls takes the passes of all of them."""
        if not self._ready:
            return
        wait_until_s = time.monotonic() + _WAIT_SHARE * self._last_s
        while self._is_early() and time.monotonic() < wait_until_s:
            self._run_brief()
            time.sleep(_POLL_S)
        began_s = time.monotonic()
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
    on_gpu = device.type == "cuda"
    return AdapterSet(model, path=path, max_context=context, checkpoints=on_gpu)
