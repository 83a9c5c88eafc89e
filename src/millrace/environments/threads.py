"""Threads for users' code: one with its own event loop for coroutines, others for sync calls and
for objects that hold the state of one episode.

Promise: a coroutine that blocks delays other coroutines of its thread, never the caller's loop.
Cancelling a call cancels the coroutine. A thread that does not end in time is abandoned as a
daemon. All code of an object, including its constructor, runs in one thread, as SQLite connections
need it. An object is reused if its episode ended normally and it is idle.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on this thread, and return its result to the calling loop."""
        return await on_loop(self._loop, coroutine)

    def start_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on this thread; callable from any other."""
        self._loop.call_soon_threadsafe(partial(function, *arguments))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels tasks at the end
            runner.get_loop().run_forever()


async def on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on another thread's loop, and return its result."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def is_cancelled() -> bool:
    """True if this task was asked to end. Otherwise users' code itself raised a CancelledError, for
    example that of a task which it has cancelled. Passed on, that would end the caller in silence,
    as if its result were not wanted any more."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_hook(owner: object, name: str) -> None:
    """Await an async method without arguments that a user's object may define."""
    method = getattr(owner, name, None)
    if inspect.iscoroutinefunction(method):
        await method()


def complete_future(future: Future[T], call: Callable[[], T]) -> None:
    """Run a sync call on this thread and complete the future, unless its caller has given up."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - users' code; raised where the future is awaited
        # A future cannot raise StopIteration, and SystemExit must end this call only.
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if is_plain else RuntimeError(f"the call raised {error!r}"))


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
