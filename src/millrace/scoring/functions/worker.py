"""Scorer process: runs users' reward functions.

Sync functions run in the main thread, one at a time, and may block it: there they can do what they
could do in a script (signals, asyncio.run), and the pool sends nothing else to a worker that runs
one. Async functions run together on an event loop in a thread of its own, which also keeps the
timeline, so that a call shows while it runs. What users print goes to this process's log.
"""

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Awaitable
from typing import Any, cast

from millrace.cluster.link import Link, WorkerCall, run_worker
from millrace.cluster.messages import GroupScored, ScoreGroup, StartScorer, Stop, WorkerProgress
from millrace.core.errors import ScoreError
from millrace.core.spans import Timeline
from millrace.scoring.functions.shipping import load_function
from millrace.scoring.functions.signature import RewardFunction, check_rewards, inspect_reward

PROGRESS_S = 0.25
CLOSE_S = 1.0
IDLE = "no work"


def main(link: Link, name: str) -> None:
    cast(Any, sys.stdout).reconfigure(line_buffering=True)  # a killed worker loses no line
    background = Background(link, name=name)
    functions: dict[str, RewardFunction] = {}
    while True:
        call = link.receive()
        assert call is not None
        match call.message:
            case StartScorer() as message:
                functions = start(call, message)
                background.mark_ready()
            case ScoreGroup() as message:
                score(call, message, function=functions[message.function], background=background)
            case Stop():
                background.close()
                call.reply()
                return
            case message:
                call.fail(TypeError(f"a scorer does not know {type(message).__name__}"))


def start(call: WorkerCall, message: StartScorer) -> dict[str, RewardFunction]:
    """Load the functions; a failure is the controller's to tell."""
    try:
        functions = {
            name: inspect_reward(load_function(location), name=name)
            for name, location in message.functions.items()
        }
    except Exception as error:  # noqa: BLE001 - importing user code; the controller raises it again
        call.fail(error)
        return {}
    call.reply()
    return functions


def score(
    call: WorkerCall, message: ScoreGroup, *, function: RewardFunction, background: "Background"
) -> None:
    """Run the function here and now; what it leaves to be awaited is awaited in the background."""
    background.begin(function.name)
    try:
        result = function(
            prompts=message.prompts,
            completions=message.completions,
            completion_ids=message.completion_ids,
            columns=message.columns,
        )
        if inspect.isawaitable(result):
            background.finish(result, call=call, message=message)
            return
        scored = check(result, message)
    except Exception as error:  # noqa: BLE001 - users' code may raise anything; the caller is told
        call.fail(explain(error, name=function.name))
    else:
        call.reply(scored)
    background.end(function.name)


def check(result: Any, message: ScoreGroup) -> GroupScored:
    num_completions = len(message.completions)
    return GroupScored(
        rewards=check_rewards(result, name=message.function, num_completions=num_completions)
    )


def explain(error: BaseException, *, name: str) -> ScoreError:
    """The error as one sentence, with the traceback of the user's code behind it."""
    if isinstance(error, ScoreError):
        return error.with_traceback(None)  # the sentence is all: its frames are ours
    words = " ".join(str(error).split()) or "no message"
    words = words if len(words) <= 300 else f"{words[:297]}..."
    failure = ScoreError(f"Reward {name!r} raised {type(error).__name__}: {words}")
    failure.__cause__ = error
    return failure


class Background:
    """The event loop of async functions, and the worker's timeline. Called from the main thread."""

    def __init__(self, link: Link, *, name: str) -> None:
        self._link = link
        self._loop = asyncio.new_event_loop()
        self._timeline = Timeline(name)  # this and what follows is touched on the loop only
        self._running: list[str] = []  # functions at work, in the order they began
        self._num_calls = 0
        self._waits: set[asyncio.Task[None]] = set()
        self._reporting = self._loop.create_task(self._report())
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def mark_ready(self) -> None:
        """Start-up is over."""
        self._loop.call_soon_threadsafe(self._show)

    def begin(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._begin, name)

    def end(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._end, name)

    def finish(self, result: Awaitable[Any], *, call: WorkerCall, message: ScoreGroup) -> None:
        """Await an async function's result, and reply."""
        self._loop.call_soon_threadsafe(self._start_wait, result, call, message)

    def close(self) -> None:
        """Report for the last time. Async calls that still run get no reply."""
        self._loop.call_soon_threadsafe(self._reporting.cancel)
        self._thread.join(CLOSE_S)  # an async function that blocks the loop is left behind

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._reporting)

    async def _report(self) -> None:
        try:
            while True:
                await asyncio.sleep(PROGRESS_S)
                self._emit()
        finally:
            self._emit()

    def _emit(self) -> None:
        counters = {"calls": float(self._num_calls)}
        self._link.emit(WorkerProgress(spans=self._timeline.drain(), counters=counters))

    def _start_wait(self, result: Awaitable[Any], call: WorkerCall, message: ScoreGroup) -> None:
        task = self._loop.create_task(self._wait(result, call, message))
        self._waits.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._waits.discard)

    async def _wait(self, result: Awaitable[Any], call: WorkerCall, message: ScoreGroup) -> None:
        try:
            scored = check(await result, message)
        except BaseException as error:  # noqa: BLE001 - SystemExit must not end the loop for all
            call.fail(explain(error, name=message.function))
        else:
            call.reply(scored)
        self._end(message.function)

    def _begin(self, name: str) -> None:
        self._running.append(name)
        self._num_calls += 1
        self._show()

    def _end(self, name: str) -> None:
        self._running.remove(name)
        self._show()

    def _show(self) -> None:
        busy = bool(self._running)
        self._timeline.enter(self._running[-1] if busy else IDLE, busy=busy)


if __name__ == "__main__":
    run_worker(main)
