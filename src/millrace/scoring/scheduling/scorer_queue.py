"""The queue in front of one scorer: bounded concurrency, batching, retries, circuit breaker.

Promise: each episode gets a result, or its caller gets one error. While the scorer is unreachable,
calls wait and none is given up: only failures while other calls could succeed use up retries.

A gate, as in `when = "format >= 1"`, lets a scorer run only on episodes that another one rated well
enough. Unknown scorer names and cycles are refused before the run starts.

Runs on the controller's event loop. The queue is bounded by its callers, that is by admission.
"""

import asyncio
import bisect
import contextlib
import operator
import random
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from millrace.core.errors import (
    ConfigError,
    RunFailed,
    ScoreError,
    TransientScoreError,
    cancel_all,
    shortened,
    user_code,
)
from millrace.core.protocols import RestartingScorer, Scorer
from millrace.core.records import Episode, Group, ScorerResult, Task
from millrace.core.spans import ScorerLoad
from millrace.scoring.scorer_type import CallSettings

MAX_BACKOFF_S = 30.0
CLOSED = "The scorers are closed; nothing can be scored any more."
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*([^\s<>=!][^<>=!]*?)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreGate:
    scorer: str
    comparison: str
    limit: float

    def passes(self, result: ScorerResult) -> bool:
        """An episode without a score does not pass."""
        return result.score is not None and COMPARISONS[self.comparison](result.score, self.limit)


def parse_gate(text: str, *, section: str) -> ScoreGate:
    if (found := CONDITION.fullmatch(text)) is not None:
        with contextlib.suppress(ValueError):  # not a number
            return ScoreGate(scorer=found[1], comparison=found[2], limit=float(found[3]))
    raise ConfigError(
        f"Setting '{section}.when' = {text!r} is not a condition; write the name of a scorer, one"
        f" of {' '.join(COMPARISONS)} and a number, as in 'format >= 1'."
    )


def check_gates(gates: Mapping[str, ScoreGate | None]) -> None:
    """Raise ConfigError for unknown names and cycles. `gates` has every scorer's gate by name."""
    for name, gate in gates.items():
        if gate is not None and gate.scorer not in gates:
            raise ConfigError(
                f"Scorer {name!r} waits for {gate.scorer!r}, which is not a scorer; the scorers"
                f" are: {', '.join(gates)}."
            )
    for name in gates:
        path = [name]
        while (gate := gates[path[-1]]) is not None:
            if gate.scorer in path:
                cycle = [*path[path.index(gate.scorer) :], gate.scorer]
                raise ConfigError(
                    f"Scorers wait for each other: {' -> '.join(cycle)}; remove the `when` of one"
                    " of them."
                )
            path.append(gate.scorer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupRef:
    """The group that queued episodes belong to. Only episodes of one group share a call."""

    order: int  # position in the queue: groups opened first are scored first
    number: int
    task: Task


@dataclass(kw_only=True, slots=True, eq=False)
class Breaker:
    """After several consecutive failures calls wait, then one probe call goes first."""

    failures: int  # consecutive failures that open it; 0 = never
    open_s: float
    now: Callable[[], float] = time.monotonic
    num_opened: int = 0
    _num_failed: int = 0  # consecutive
    _probe_at_s: float | None = None  # earliest time of the probe; None = closed
    _is_probing: bool = False

    @property
    def is_open(self) -> bool:
        return self._probe_at_s is not None

    def wait_s(self) -> float | None:
        """Seconds until the next call may start; None until the probe under way has ended."""
        if self._probe_at_s is None:
            return 0.0
        return None if self._is_probing else max(0.0, self._probe_at_s - self.now())

    def begin(self) -> bool:
        """Start a call; returns True if it is the probe."""
        assert self.wait_s() == 0.0
        self._is_probing = self.is_open
        return self._is_probing

    def answered(self) -> None:
        """Close the breaker: the service answered, whatever the answer was."""
        self._num_failed = 0
        self._probe_at_s = None
        self._is_probing = False

    def failed(self, *, is_probe: bool, retry_after_s: float | None = None) -> None:
        """Count a failure; `retry_after_s` is the delay that the service asked for."""
        self._num_failed += 1
        wait_s = self.open_s if retry_after_s is None else retry_after_s
        if is_probe:
            self._is_probing = False
        elif self.is_open:  # this call was in flight when the breaker opened
            wait_s = retry_after_s or 0.0
        elif not 0 < self.failures <= self._num_failed:
            return
        else:
            self.num_opened += 1
        self._probe_at_s = max(self._probe_at_s or 0.0, self.now() + wait_s)

    def abandoned(self, *, is_probe: bool) -> None:
        """The caller cancelled the call, so its outcome is unknown."""
        if is_probe:
            self._is_probing = False


@dataclass(slots=True, eq=False)
class _ScoreCall:
    """One call of the scorer, and the task that makes it."""

    group: GroupRef
    order: int
    entries: list[tuple[Episode, asyncio.Future[ScorerResult]]] = field(default_factory=list)
    state: Literal["queued", "in flight", "pausing"] = "queued"
    starts: asyncio.Event = field(default_factory=asyncio.Event)  # set when it leaves the queue
    is_probe: bool = False
    task: asyncio.Task[None] = field(init=False)

    def fail(self, error: Exception) -> None:
        for _, result in self.entries:
            if not result.done():
                result.set_exception(error)


@dataclass(eq=False)
class ScorerQueue:
    scorer: Scorer
    _: KW_ONLY
    calls: CallSettings
    warn: Callable[[str], None]
    gate: ScoreGate | None = None  # the caller applies it
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep
    draw: Callable[[], float] = random.random  # the random part of a backoff, from 0 to 1

    def __post_init__(self) -> None:
        calls, now = self.calls, self.now
        self._breaker = Breaker(failures=calls.breaker_failures, open_s=calls.breaker_s, now=now)
        self._load = ScorerLoad(concurrency=calls.concurrency)
        self._counted_s = now()
        self._queue: list[_ScoreCall] = []  # sorted by order
        self._open: dict[GroupRef, _ScoreCall] = {}  # queued calls that still have room
        self._calls: set[_ScoreCall] = set()  # that have not ended
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def takes_groups(self) -> bool:
        """True if the scorer gets all episodes of a group in one call."""
        return self.calls.batch == 0

    async def score(self, episodes: Sequence[Episode], *, group: GroupRef) -> list[ScorerResult]:
        """Score the episodes; raises ScoreError. Cancelling withdraws them from the queue."""
        if self._is_closed:
            raise RunFailed(CLOSED)
        call = self._call_with_room(len(episodes), group)
        loop = asyncio.get_running_loop()
        entries = [(episode, loop.create_future()) for episode in episodes]
        call.entries += entries
        self._count(waiting=len(episodes))
        try:
            return await asyncio.gather(*(result for _, result in entries))
        except asyncio.CancelledError:
            if call.state != "in flight":
                self._drop_cancelled(call)
            if all(result.cancelled() for _, result in call.entries):
                call.task.cancel()
            raise

    def skip(self) -> None:
        """Count an episode that did not pass the gate."""
        self._load.skipped += 1

    def load(self) -> ScorerLoad:
        self._count()
        return replace(
            self._load,
            breaker_opened=self._breaker.num_opened,
            is_held=self._breaker.is_open,
            lost=self.scorer.num_lost if isinstance(self.scorer, RestartingScorer) else 0,
        )

    async def close(self) -> None:
        """Cancel the calls in flight and fail everything that waits."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.fail(RunFailed(CLOSED))
        await cancel_all(call.task for call in self._calls)

    def _count(self, *, waiting: int = 0, in_flight: int = 0) -> None:
        """Add to the episodes that wait, to the calls in flight, and to the totals over time."""
        now_s, load = self.now(), self._load
        load.busy_s += load.in_flight * (now_s - self._counted_s)
        load.waiting_s += load.waiting * (now_s - self._counted_s)
        self._counted_s = now_s
        load.waiting += waiting
        load.in_flight += in_flight

    def _call_with_room(self, num_episodes: int, group: GroupRef) -> _ScoreCall:
        """Return a queued call of the group that has room for these episodes, or a new one."""
        call = self._open.get(group)
        if call is None or len(call.entries) + num_episodes > self.calls.batch:
            call = self._open[group] = _ScoreCall(group, group.order)
            self._enqueue(call)
            self._calls.add(call)
            call.task = asyncio.create_task(self._run(call))
            # A callback, not code in the task: a task that is cancelled at once never runs.
            call.task.add_done_callback(partial(self._ended, call))
        return call

    def _enqueue(self, call: _ScoreCall) -> None:
        call.state = "queued"
        call.starts.clear()
        bisect.insort_right(self._queue, call, key=lambda other: other.order)
        # Calls start later, so that episodes that finish together share one.
        asyncio.get_running_loop().call_soon(self._start_calls)

    def _leave_queue(self, call: _ScoreCall) -> None:
        self._queue.remove(call)
        if self._open.get(call.group) is call:
            del self._open[call.group]

    def _start_calls(self) -> None:
        """Start queued calls as far as concurrency and the breaker allow."""
        while self._queue and self._load.in_flight < self.calls.concurrency:
            wait_s = self._breaker.wait_s()
            if wait_s is None:
                return  # the end of the probe calls this method again
            if wait_s > 0:
                if self._timer is not None:
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(wait_s, self._start_calls)
                return
            call = self._queue[0]
            self._leave_queue(call)
            self._count(waiting=-len(call.entries), in_flight=1)
            call.state = "in flight"
            call.is_probe = self._breaker.begin()
            call.starts.set()

    async def _run(self, call: _ScoreCall) -> None:
        try:
            results = await self._score_with_retries(call)
            for (_, result), scored in zip(call.entries, results, strict=True):
                if not result.done():
                    result.set_result(scored)
        except asyncio.CancelledError as error:
            if not call.task.cancelling():  # the scorer raised it; nobody gave the call up
                self._load.failures += 1
                call.fail(ScoreError(f"Scorer {self.scorer.name!r} raised {error!r}; fix it."))
            raise
        except Exception as error:  # noqa: BLE001 - the callers of score() raise it
            self._load.failures += isinstance(error, ScoreError)
            call.fail(error)

    def _ended(self, call: _ScoreCall, task: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if call in self._queue:
            self._leave_queue(call)
        elif call.state == "in flight":
            self._count(in_flight=-1)
            if task.cancelled():
                self._breaker.abandoned(is_probe=call.is_probe)
        if not self._is_closed:
            self._start_calls()

    async def _score_with_retries(self, call: _ScoreCall) -> Sequence[ScorerResult]:
        num_attempts = num_failed = 0
        while True:
            await call.starts.wait()
            self._load.calls += 1
            self._load.retries += num_attempts > 0
            num_attempts += 1
            try:
                return await self._attempt(call)
            except TransientScoreError as error:
                pause_s = 0.0
                if not self._breaker.is_open:  # otherwise the breaker decides when to retry
                    num_failed += 1
                    if num_failed > self.calls.retries:
                        if num_attempts > 1:
                            tried = f"(tried {num_attempts} times)"
                            error.args = (f"{str(error).rstrip('.')} {tried}.",)
                        raise
                    pause_s = min(self.calls.backoff_s * 2 ** (num_failed - 1), MAX_BACKOFF_S)
                    pause_s = max(pause_s * (0.5 + 0.5 * self.draw()), error.retry_after_s or 0.0)
            await self._pause(call, pause_s)

    async def _attempt(self, call: _ScoreCall) -> Sequence[ScorerResult]:
        number, episodes = call.group.number, tuple(episode for episode, _ in call.entries)
        group = Group(number=number, task=call.group.task, episodes=episodes)
        try:
            with user_code(f"Scorer {self.scorer.name!r} (group {number})"):
                results = [*await self.scorer.score(group)]
        except Exception as error:
            if isinstance(error, TransientScoreError) and error.is_down:
                self._count_outage(call, error)
            else:
                self._breaker.answered()
            raise
        self._breaker.answered()
        if len(results) != len(episodes):  # possible in a user's own scorer
            raise ScoreError(
                f"Scorer {self.scorer.name!r} returned {len(results)} results for"
                f" {len(episodes)} episodes of group {number}; return one per episode."
            )
        for episode, result in zip(episodes, results, strict=True):
            possible = (0, len(episode.rollouts))
            if not isinstance(result, ScorerResult) or len(result.token_scores) not in possible:
                raise ScoreError(
                    f"Scorer {self.scorer.name!r} returned {shortened(repr(result), 60)} for an"
                    f" episode of group {number}; return a ScorerResult, with token scores for"
                    f" none or all of its {len(episode.rollouts)} rollouts."
                )
        self._load.episodes += len(episodes)
        return results

    def _count_outage(self, call: _ScoreCall, error: TransientScoreError) -> None:
        num_opened = self._breaker.num_opened
        self._breaker.failed(is_probe=call.is_probe, retry_after_s=error.retry_after_s)
        if num_opened == 0 and self._breaker.is_open:
            self.warn(
                f"scorer {self.scorer.name!r} is unreachable; its calls wait until it answers"
                f" (later outages are only counted): {error}"
            )

    async def _pause(self, call: _ScoreCall, pause_s: float) -> None:
        call.state = "pausing"
        self._count(waiting=len(call.entries), in_flight=-1)
        self._drop_cancelled(call)
        self._start_calls()
        await self.sleep(pause_s)
        # Behind everything that waits now: if this call crashes the scorer, the others still run.
        call.order = self._queue[-1].order if self._queue else call.order
        self._enqueue(call)

    def _drop_cancelled(self, call: _ScoreCall) -> None:
        """Withdraw the episodes whose callers were cancelled."""
        left = [entry for entry in call.entries if not entry[1].cancelled()]
        self._count(waiting=len(left) - len(call.entries))
        call.entries = left
