"""The queue in front of one scorer: bounded concurrency, batching, retries, circuit breaker.

Promise: each episode gets a result, or its caller gets one error. While the scorer is unreachable,
calls wait and none is given up: only failures while other calls could succeed use up retries.

Runs on the controller's event loop. The queue is bounded by its callers, that is by admission.
"""

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.errors import RunFailed, ScoreError, TransientScoreError
from millrace.core.protocols import RestartingScorer, Scorer
from millrace.core.records import Episode, Group, ScorerResult, Task
from millrace.core.spans import ScorerLoad
from millrace.scoring.scheduling.breaker import Breaker
from millrace.scoring.scheduling.gates import ScoreGate
from millrace.scoring.scorer_type import CallSettings

MAX_BACKOFF_S = 30.0
CLOSED = "The scorers are closed; nothing can be scored any more."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupRef:
    """The group that queued episodes belong to. Only episodes of one group share a call."""

    order: int  # position in the queue: groups opened first are scored first
    number: int
    task: Task


@dataclass(slots=True, eq=False)
class _Entry:
    """Episodes that one caller wants scored together."""

    episodes: Sequence[Episode]
    results: asyncio.Future[list[ScorerResult]]


@dataclass(slots=True, eq=False)
class _ScoreCall:
    """One call of the scorer, queued, in flight or between two attempts."""

    group: GroupRef
    order: int
    entries: list[_Entry] = field(default_factory=list[_Entry])
    num_failed: int = 0  # attempts that count against `retries`
    num_attempts: int = 0
    task: asyncio.Task[Any] | None = None  # the attempt, or the pause before the next one

    @property
    def episodes(self) -> list[Episode]:
        return [episode for entry in self.entries for episode in entry.episodes]

    def resolve(self, results: Sequence[ScorerResult]) -> None:
        remaining = iter(results)
        for entry in self.entries:
            own = list(itertools.islice(remaining, len(entry.episodes)))
            if not entry.results.done():
                entry.results.set_result(own)

    def fail(self, error: Exception) -> None:
        for entry in self.entries:
            if not entry.results.done():
                entry.results.set_exception(error)


class _Usage:
    """Counters and waiting times of one queue, for ScorerLoad."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        self.in_flight = 0  # calls
        self.counts = dict.fromkeys(("episodes", "calls", "retries", "failures", "skipped"), 0)
        self._waiting = 0  # episodes
        self._busy_s = 0.0  # integral of calls in flight over time
        self._waiting_s = 0.0  # integral of waiting episodes over time
        self._now = now
        self._since_s = now()

    def change(self, *, waiting: int = 0, in_flight: int = 0) -> None:
        """Add to the episodes that wait, and to the calls in flight."""
        now_s = self._now()
        self._busy_s += self.in_flight * (now_s - self._since_s)
        self._waiting_s += self._waiting * (now_s - self._since_s)
        self._since_s = now_s
        self._waiting += waiting
        self.in_flight += in_flight

    def load(self, **state: Any) -> ScorerLoad:
        """`state`: the fields that are not counted here."""
        self.change()
        return ScorerLoad(
            in_flight=self.in_flight,
            waiting=self._waiting,
            busy_s=self._busy_s,
            waiting_s=self._waiting_s,
            **self.counts,
            **state,
        )


class ScorerQueue:
    def __init__(
        self,
        scorer: Scorer,
        *,
        calls: CallSettings,
        warn: Callable[[str], None],
        gate: ScoreGate | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """The caller applies `gate`. `draw` returns the random part of a backoff, from 0 to 1."""
        self.scorer = scorer
        self.gate = gate
        self._settings = calls
        self._warn = warn
        self._sleep = sleep
        self._draw = draw
        self._breaker = Breaker(failures=calls.breaker_failures, open_s=calls.breaker_s, now=now)
        self._usage = _Usage(now=now)
        self._queue: list[_ScoreCall] = []  # sorted by order
        self._open: dict[GroupRef, _ScoreCall] = {}  # queued calls that still have room
        self._active: set[_ScoreCall] = set()  # in flight, or pausing before their next attempt
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def takes_groups(self) -> bool:
        """True if the scorer gets all episodes of a group in one call."""
        return self._settings.batch == 0

    async def score(self, episodes: Sequence[Episode], *, group: GroupRef) -> list[ScorerResult]:
        """Score the episodes; raises ScoreError. Cancelling withdraws them from the queue."""
        if self._is_closed:
            raise RunFailed(CLOSED)
        loop = asyncio.get_running_loop()
        entry = _Entry(episodes, loop.create_future())
        self._usage.change(waiting=len(episodes))
        call = self._add_to_call(entry, group)
        loop.call_soon(self._start_calls)  # not now: episodes that finish together share a call
        try:
            return await entry.results
        except asyncio.CancelledError:
            self._withdraw(entry, call)
            raise

    def skip(self) -> None:
        """Count an episode that did not pass the gate."""
        self._usage.counts["skipped"] += 1

    def load(self) -> ScorerLoad:
        return self._usage.load(
            concurrency=self._settings.concurrency,
            breaker_opened=self._breaker.num_opened,
            is_held=self._breaker.is_open,
            lost=self.scorer.num_lost if isinstance(self.scorer, RestartingScorer) else 0,
        )

    async def close(self) -> None:
        """Cancel the calls in flight and fail everything that waits."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for call in [*self._queue, *self._active]:
            call.fail(RunFailed(CLOSED))
        self._queue.clear()
        tasks = [call.task for call in self._active if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add_to_call(self, entry: _Entry, group: GroupRef) -> _ScoreCall:
        """Add the entry to a queued call of its group that has room, or to a new call."""
        room = self._settings.batch - len(entry.episodes)
        call = self._open.get(group)
        if call is None or len(call.episodes) > room:
            call = _ScoreCall(group, group.order)
            self._enqueue(call)
            self._open[group] = call
        call.entries.append(entry)
        return call

    def _enqueue(self, call: _ScoreCall) -> None:
        bisect.insort_right(self._queue, call, key=lambda other: other.order)

    def _start_calls(self) -> None:
        """Start queued calls as far as concurrency and the breaker allow."""
        while self._queue and self._usage.in_flight < self._settings.concurrency:
            wait_s = self._breaker.wait_s()
            if wait_s is None:
                return  # the end of the probe calls this method again
            if wait_s > 0:
                if self._timer is not None:
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(wait_s, self._start_calls)
                return
            call = self._queue.pop(0)
            self._close_to_entries(call)
            self._start_attempt(call)

    def _close_to_entries(self, call: _ScoreCall) -> None:
        if self._open.get(call.group) is call:
            del self._open[call.group]

    def _start_attempt(self, call: _ScoreCall) -> None:
        self._usage.change(waiting=-len(call.episodes), in_flight=1)
        self._usage.counts["calls"] += 1
        self._usage.counts["retries"] += call.num_attempts > 0
        call.num_attempts += 1
        is_probe = self._breaker.begin()
        self._active.add(call)
        call.task = asyncio.create_task(self._attempt(call, is_probe=is_probe))
        # A callback, not code in the task: a task that is cancelled at once never runs.
        call.task.add_done_callback(lambda task: self._attempted(call, task, is_probe=is_probe))

    async def _attempt(self, call: _ScoreCall, *, is_probe: bool) -> float | None:
        """Call the scorer. Returns the pause before the next attempt, or None if there is none."""
        ref, episodes = call.group, tuple(call.episodes)
        group = Group(number=ref.number, task=ref.task, episodes=episodes)
        try:
            results = await self.scorer.score(group)
            if len(results) != len(episodes):  # possible in a user's own scorer
                raise ScoreError(
                    f"Scorer {self.scorer.name!r} returned {len(results)} results for"
                    f" {len(episodes)} episodes of group {ref.number}; return one per episode."
                )
        except TransientScoreError as error:
            return self._failed(call, error, is_probe=is_probe)
        except Exception as error:  # noqa: BLE001 - the caller of score() raises it
            self._breaker.answered()
            self._usage.counts["failures"] += isinstance(error, ScoreError)
            call.fail(error)
        else:
            self._breaker.answered()
            self._usage.counts["episodes"] += len(episodes)
            call.resolve(results)
        return None

    def _attempted(
        self, call: _ScoreCall, task: asyncio.Task[float | None], *, is_probe: bool
    ) -> None:
        self._usage.change(in_flight=-1)
        self._active.discard(call)
        if task.cancelled():
            self._breaker.abandoned(is_probe=is_probe)
        elif (pause_s := task.result()) is not None:
            self._pause(call, pause_s)
        self._start_calls()

    def _failed(
        self, call: _ScoreCall, error: TransientScoreError, *, is_probe: bool
    ) -> float | None:
        """Return the pause before the next attempt, or None if that was the last one."""
        was_open = self._breaker.is_open
        if error.is_down:
            self._breaker.failed(is_probe=is_probe, retry_after_s=error.retry_after_s)
        else:
            self._breaker.answered()
        if self._breaker.is_open:
            if not was_open and self._breaker.num_opened == 1:
                self._warn(
                    f"scorer {self.scorer.name!r} is unreachable; its calls wait until it answers"
                    f" (later outages are only counted): {error}"
                )
            return 0.0  # the breaker decides when the call starts
        call.num_failed += 1
        if call.num_failed > self._settings.retries:
            self._usage.counts["failures"] += 1
            call.fail(_final_error(error, num_attempts=call.num_attempts))
            return None
        pause_s = min(self._settings.backoff_s * 2 ** (call.num_failed - 1), MAX_BACKOFF_S)
        return max(pause_s * (0.5 + 0.5 * self._draw()), error.retry_after_s or 0.0)

    def _pause(self, call: _ScoreCall, pause_s: float) -> None:
        num_waiting = len(call.episodes)
        self._usage.change(waiting=num_waiting)
        self._active.add(call)
        call.task = asyncio.create_task(self._sleep(pause_s))
        call.task.add_done_callback(lambda _: self._requeue(call, num_waiting))

    def _requeue(self, call: _ScoreCall, num_waiting: int) -> None:
        # Behind everything that waits now: if this call crashes the scorer, the others still run.
        self._active.discard(call)
        call.entries = [entry for entry in call.entries if not entry.results.done()]
        self._usage.change(waiting=len(call.episodes) - num_waiting)
        if call.entries:  # otherwise all were withdrawn during the pause
            call.order = self._queue[-1].order if self._queue else call.order
            self._enqueue(call)
            self._start_calls()

    def _withdraw(self, entry: _Entry, call: _ScoreCall) -> None:
        if call in self._queue:
            call.entries.remove(entry)
            self._usage.change(waiting=-len(entry.episodes))
            if not call.entries:
                self._queue.remove(call)
                self._close_to_entries(call)
        elif call.task is not None and all(other.results.cancelled() for other in call.entries):
            call.task.cancel()


def _final_error(error: TransientScoreError, *, num_attempts: int) -> ScoreError:
    if num_attempts == 1:
        return error
    final = ScoreError(f"{str(error).rstrip('.')} (tried {num_attempts} times).")
    for note in getattr(error, "__notes__", ()):
        final.add_note(note)
    return final
