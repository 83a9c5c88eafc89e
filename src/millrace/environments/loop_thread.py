"""Threads for users' code: one with its own event loop for coroutines, others for sync calls.

Promise: a coroutine that blocks delays other coroutines of its thread, never the caller's loop.
Cancelling a call cancels the coroutine. A thread that does not end in time is abandoned as a
daemon.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_TIMEOUT_S)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on this thread, and return its result to the calling loop."""
        return await on_loop(self._loop, coroutine)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())


async def on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on another thread's loop, and return its result."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


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
