"""Runs a command on an event loop of its own: uvloop where it is installed.

Promise: Ctrl-C and SIGTERM cancel the command, so that it can clean up, and then raise
KeyboardInterrupt or its subclass Terminated; afterwards they do what they did before. The calling
thread must not have a running loop.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

from millrace.core.errors import Terminated

T = TypeVar("T")


def run_on_own_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns; returns its result."""
    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in signals}
    received: list[signal.Signals] = []

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            received.append(number)
            task.cancel(number.name)

        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await make()

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise (Terminated if received[:1] == [signal.SIGTERM] else KeyboardInterrupt) from None
    finally:
        for number, handler in handlers.items():  # uvloop would leave its own
            signal.signal(number, handler)
