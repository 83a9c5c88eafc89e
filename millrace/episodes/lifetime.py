"""Environments that want to know when a run begins and ends, as those that hold connections do."""

import contextlib
import inspect
from collections.abc import AsyncGenerator
from typing import Any

from millrace.episodes.loop_thread import LoopThread


@contextlib.asynccontextmanager
async def lifetime(function: Any, *, thread: LoopThread) -> AsyncGenerator[None]:
    """Await its open(), if it has one, and at the end its close(), on the thread that runs it."""
    try:
        await _told(function, "open", thread=thread)
        yield
    finally:
        await _told(function, "close", thread=thread)


async def _told(function: Any, method: str, *, thread: LoopThread) -> None:
    tell = getattr(function, method, None)
    if inspect.iscoroutinefunction(tell):
        await thread.run(tell())
