"""The scorer process: `python -m millrace.scoring.functions.worker` runs users' reward functions.

Sync functions run in the main thread, one at a time, and may block it. There they can use signals
and asyncio.run as in a script, and the controller sends nothing else meanwhile. Async functions
share an event loop in a second thread, which also owns the timeline, so that a call is visible
while it runs. Output of the functions goes to the log of this process.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

from millrace.cluster.link import Link, WorkerCall, run_module, unexpected
from millrace.cluster.messages import GroupScored, ScoreGroup, StartScorer, Stop, WorkerProgress
from millrace.core.errors import ScoreError, shortened
from millrace.core.spans import Timeline
from millrace.scoring.functions.user_function import check_rewards, inspect_reward, load_function

PROGRESS_S = 0.25
CLOSE_S = 1.0
IDLE = "no work"


class ScorerWorker:
    """serve() and _score() run in the main thread, all other methods on the event loop."""

    def __init__(self, message: StartScorer, link: Link, timeline: Timeline) -> None:
        self._functions = {
            name: inspect_reward(load_function(location), name=name)
            for name, location in message.functions.items()
        }
        timeline.enter(IDLE, busy=False)
        self._link = link
        self._timeline = timeline
        self._running: list[str] = []  # functions, in the order they were called
        self._num_calls = 0
        self._waits: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.call_later(PROGRESS_S, self._report)

    def serve(self) -> None:
        thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        thread.start()
        while True:
            call = self._link.receive()
            assert call is not None
            match call.message:
                case ScoreGroup() as message:
                    self._score(call, message)
                case Stop():  # async calls that still run get no reply
                    self._loop.call_soon_threadsafe(self._stop)
                    thread.join(CLOSE_S)  # a function may block the loop; it ends with the process
                    call.reply()
                    return
                case _:
                    call.fail(unexpected(call))

    def _score(self, call: WorkerCall, message: ScoreGroup) -> None:
        """Run the function in this thread; an awaitable result is awaited on the event loop."""
        on_loop = self._loop.call_soon_threadsafe
        on_loop(self._begin, message.function)
        try:
            result = self._functions[message.function](
                prompts=message.prompts,
                completions=message.completions,
                completion_ids=message.completion_ids,
                columns=message.columns,
            )
            if inspect.isawaitable(result):
                on_loop(self._start_wait, result, call, message)
                return
            scored = _check(result, message)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            call.fail(_explain(error, name=message.function))
        else:
            call.reply(scored)
        on_loop(self._end, message.function)

    def _report(self) -> None:
        self._loop.call_later(PROGRESS_S, self._report)
        counters = {"calls": float(self._num_calls)}
        self._link.emit(WorkerProgress(spans=self._timeline.drain(), counters=counters))

    def _stop(self) -> None:
        self._report()
        self._loop.stop()

    def _start_wait(self, result: Awaitable[Any], call: WorkerCall, message: ScoreGroup) -> None:
        task = self._loop.create_task(self._wait(result, call, message))
        self._waits.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._waits.discard)

    async def _wait(self, result: Awaitable[Any], call: WorkerCall, message: ScoreGroup) -> None:
        try:
            scored = _check(await result, message)
        except BaseException as error:  # noqa: BLE001 - SystemExit must not end the loop
            call.fail(_explain(error, name=message.function))
        else:
            call.reply(scored)
        self._end(message.function)

    def _begin(self, name: str) -> None:
        self._running.append(name)
        self._num_calls += 1
        self._timeline.enter(name, busy=True)

    def _end(self, name: str) -> None:
        self._running.remove(name)
        busy = bool(self._running)
        self._timeline.enter(self._running[-1] if busy else IDLE, busy=busy)


def _check(result: Any, message: ScoreGroup) -> GroupScored:
    num_completions = len(message.completions)
    return GroupScored(
        rewards=check_rewards(result, name=message.function, num_completions=num_completions)
    )


def _explain(error: BaseException, *, name: str) -> ScoreError:
    """The error as one sentence, with the traceback of the user's code as its cause."""
    if isinstance(error, ScoreError):
        return error.with_traceback(None)  # its frames are Millrace's own
    text = shortened(" ".join(str(error).split()) or "no message", 300)
    failure = ScoreError(f"Reward {name!r} raised {type(error).__name__}: {text}")
    failure.__cause__ = error
    return failure


if __name__ == "__main__":
    run_module(StartScorer, ScorerWorker)
