"""Objects of users that hold the state of one episode, each with a thread of its own.

All code of such an object, from its making on, runs in that one thread: some can be used nowhere
else, such as connections to SQLite, and none has to expect two calls at once.

Promise: the event loop never waits for it. An object whose episode ended well is used again for
another; one that is still at work then, or whose episode did not, is not.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Confined(Generic[T]):
    """One object, used from one event loop at a time."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_waiting = 0  # jobs that have not ended
        self._thing: T | None = None
        threading.Thread(target=self._work, name="confined", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self._num_waiting > 0

    async def run(self, call: Callable[[T], R]) -> R:
        """What a call with the object gives. Who gives up waiting leaves it at work."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def job() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                if self._thing is None:
                    self._thing = self._make()
                result = call(self._thing)
            except Exception as raised:  # noqa: BLE001 - the user's own code; who waits is told
                error = _passable(raised)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._tell, done, result, error)

        self._num_waiting += 1
        self._jobs.put(job)
        return await done

    def end(self, last: Callable[[T], Any] | None = None) -> None:
        """Once all jobs are done and, if the object was made, the last call with it."""

        def job() -> None:
            if last is not None and self._thing is not None:
                last(self._thing)

        self._jobs.put(job)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _tell(self, done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._num_waiting -= 1
        if done.done():
            return  # given up meanwhile
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


class Instances(Generic[T]):
    """As many objects as episodes are played at once. Belongs to the loop of the environments."""

    def __init__(self, make: Callable[[], T], *, last: Callable[[T], Any] | None = None) -> None:
        """`last` is called with each that is not used any more."""
        self._make = make
        self._last = last
        self._idle: list[Confined[T]] = []

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncGenerator[Confined[T]]:
        """One for an episode."""
        lent = self._idle.pop() if self._idle else Confined(self._make)
        is_well = False
        try:
            yield lent
            is_well = not lent.is_busy
        finally:
            if is_well:
                self._idle.append(lent)
            else:
                lent.end(self._last)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end(self._last)


def _passable(error: Exception) -> Exception:
    """No future takes a StopIteration."""
    return RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
