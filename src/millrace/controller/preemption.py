"""Stops a run early: at SIGTERM, which schedulers send at preemption and before a time limit, and
when the user asks for it, with Run.stop() or with StopTraining in a callback.

Promise: a run that trains finishes its step, writes a checkpoint and raises Preempted; after its
last step it finishes as any other. A run that cannot do so within `grace_s` of SIGTERM, or that has
nothing to save, is cancelled and raises Preempted, too: the journal holds what came after its
newest checkpoint. Ctrl-C still cancels at once. Entered on the controller's event loop; where that
is not in the main thread, no signal arrives.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from millrace.core.errors import Preempted

T = TypeVar("T")

SIGTERM = "SIGTERM"


@dataclass(kw_only=True, eq=False)
class Preemption:
    grace_s: float = 0.0  # for a run that SIGTERM stops
    warn: Callable[[str], None] = lambda sentence: None
    reason: str | None = None
    _loop: asyncio.AbstractEventLoop | None = None  # None outside the context
    _wanted: str | None = None  # reason of a request of another thread
    _requested: asyncio.Event = field(default_factory=asyncio.Event)
    # Unlike timeout(), outside a loop, too.
    _limit: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    _can_save: bool = False

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Meanwhile the caller itself ends in time and raises Preempted."""
        self._can_save = True
        try:
            yield
        finally:
            self._can_save = False

    async def unless_requested(self, work: asyncio.Task[T]) -> T | None:
        """The result of `work`; None if SIGTERM comes first."""
        notice = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({work, notice}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            notice.cancel()
        return None if self.is_requested else work.result()

    def request(self, reason: str = SIGTERM) -> None:
        """What SIGTERM does; a second one changes nothing."""
        if self.reason in (SIGTERM, reason):
            return
        self.reason = reason
        self._requested.set()
        if self._loop is None or self._limit.expired():  # the run has ended, or is about to
            return
        if not self._can_save:
            self._limit.reschedule(self._loop.time())
        elif reason == SIGTERM:
            self.warn(
                f"SIGTERM: the run finishes its step and writes a checkpoint, within"
                f" {self.grace_s:g} s (checkpoint.grace_s)."
            )
            self._limit.reschedule(self._loop.time() + self.grace_s)

    def finish_step(self, reason: str) -> None:
        """End the training after this step. What comes before the first step is not cancelled."""
        self.reason = self.reason or reason
        self._requested.set()

    def request_from_thread(self, reason: str) -> None:
        """request() from any thread, also before the run is ready for it. Without effect once the
        run has ended."""
        self._wanted = reason  # first, so that __aenter__ sees it if there is no loop yet
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(self.request, reason)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        if self._wanted is not None:
            self.request(self._wanted)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.request)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop = None
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Preempted(
                f"The run was stopped by {self.reason}; resume it with --resume."
            ) from None
