"""Runs a command on an event loop of its own: uvloop where it is installed.

Promise: Ctrl-C and SIGTERM cancel the command, so that it can clean up, and then raise
KeyboardInterrupt. A loop that already runs, as in a notebook, is not touched.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_own_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns; returns its result."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(make)
    return ThreadPoolExecutor(1, thread_name_prefix="millrace-run").submit(_run_here, make).result()


def _run_here(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        loop = runner.get_loop()

        async def main() -> T:
            task = asyncio.current_task()
            assert task is not None
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, task.cancel, number.name)
            return await make()

        try:
            return runner.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
