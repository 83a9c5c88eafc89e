"""User objects that hold the state of one episode, each with a thread of its own.

All code of an object, including its constructor, runs in one thread: some objects, such as SQLite
connections, work nowhere else, and none has to handle concurrent calls.

Promise: the event loop never blocks. An object is reused if its episode ended normally and it is
idle; otherwise it is discarded.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from millrace.environments.loop_thread import complete_future

T = TypeVar("T")
R = TypeVar("R")


class ObjectThread(Generic[T]):
    """One object, created on first use. Used from one event loop at a time."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._futures: list[Future[Any]] = []  # of jobs that may not have ended
        self._object: T | None = None
        threading.Thread(target=self._work, name="environment object", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return not all(future.done() for future in self._futures)

    async def run(self, call: Callable[[T], R]) -> R:
        """Call a function with the object. Cancelling the caller does not stop a running call."""

        def job() -> R:
            if self._object is None:
                self._object = self._make()
            return call(self._object)

        future: Future[R] = Future()
        self._futures = [*(f for f in self._futures if not f.done()), future]
        self._jobs.put(partial(complete_future, future, job))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[T], Any] | None = None) -> None:
        """End the thread after all jobs and, if the object exists, after `last`."""

        def job() -> None:
            if last is not None and self._object is not None:
                last(self._object)

        self._jobs.put(job)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class ObjectPool(Generic[T]):
    """One object per concurrent episode. Used from the loop of the environments."""

    def __init__(self, make: Callable[[], T], *, last: Callable[[T], Any] | None = None) -> None:
        """`last` is called with each object that is discarded."""
        self._make = make
        self._last = last
        self._idle: list[ObjectThread[T]] = []

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncGenerator[ObjectThread[T]]:
        lent = self._idle.pop() if self._idle else ObjectThread(self._make)
        is_reusable = False
        try:
            yield lent
            is_reusable = not lent.is_busy
        finally:
            if is_reusable:
                self._idle.append(lent)
            else:
                lent.end(self._last)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end(self._last)
