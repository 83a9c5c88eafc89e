"""What monitoring reports: spans of one worker, the times of one group, the load of one scorer.

Promise: at any moment a worker is in exactly one span, so a timeline has no gaps and shares sum to
1. Each worker owns one Timeline and drains it to the controller; a Timeline is used by one thread.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_SPAN_S = 1.0  # longer activities are cut into spans, so that a live view is up to date


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    worker: str
    name: str  # activity such as "generate" or "swap", or a wait reason such as "no work"
    busy: bool
    start_s: float  # seconds since the epoch, on a clock that never jumps within a process
    end_s: float
    count: int = 1  # consecutive activities of this name that were joined


class Timeline:
    """Records what one worker does. `enter` ends the current span and begins the next."""

    def __init__(self, worker: str, *, name: str = "start", busy: bool = True) -> None:
        self.worker = worker
        # Wall time, comparable across processes of a host, and still immune to jumps.
        self._offset_s = time.time() - time.monotonic()
        self._name, self._busy, self._count = name, busy, 1
        self._start = self._now_s()
        self._done: list[Span] = []

    def enter(self, name: str, *, busy: bool) -> None:
        """Begin an activity. Repeats of the current one are joined into one span."""
        now = self._now_s()
        if name == self._name and busy == self._busy and now - self._start < MAX_SPAN_S:
            self._count += 1
            return
        self._close(now)
        self._name, self._busy, self._count = name, busy, 1

    def drain(self) -> list[Span]:
        """All spans up to now; the current one is cut here."""
        self._close(self._now_s())
        self._count = 0
        done, self._done = self._done, []
        return done

    def _now_s(self) -> float:
        return self._offset_s + time.monotonic()

    def _close(self, now: float) -> None:
        if now > self._start:
            self._done.append(
                Span(
                    worker=self.worker,
                    name=self._name,
                    busy=self._busy,
                    start_s=self._start,
                    end_s=now,
                    count=self._count,
                )
            )
        self._start = now


class TurnLife(NamedTuple):
    """A reply of the policy; between two of them, the environment and its tools are at work."""

    start_s: float
    end_s: float
    num_tokens: int
    first_version: int
    last_version: int


@dataclass(kw_only=True, slots=True)
class GroupLife:
    """The times of one attempt at a group, in seconds of the run; None = it did not get there."""

    number: int
    tries: int = 0  # earlier attempts, which became too stale
    started_s: float
    generated_s: float | None = None
    scored_s: float | None = None
    ended_s: float | None = None
    outcome: Literal["running", "buffered", "expired", "dropped", "failed"] = "running"
    reason: str = ""  # why it was lost; of an expired group, which is tried again, the stage
    turns: dict[int, list[TurnLife]]  # by episode, before any were filtered
    scores: Sequence[float | None] = ()  # of these episodes


@dataclass(kw_only=True, slots=True)
class ScorerLoad:
    """How busy one scorer is; totals are since the start of the run."""

    concurrency: int  # calls that may be in flight
    in_flight: int = 0  # calls in flight now
    waiting: int = 0  # episodes waiting now for a call, a retry or an open circuit breaker
    busy_s: float = 0.0  # total of seconds times calls in flight
    waiting_s: float = 0.0  # total of seconds times episodes waiting
    episodes: int = 0  # scored
    calls: int = 0  # including retries
    retries: int = 0
    failures: int = 0  # calls that failed finally; each costs its group
    skipped: int = 0  # episodes that did not pass the scorer's gate
    breaker_opened: int = 0
    is_held: bool = False  # the circuit breaker is open now
    lost: int = 0  # processes of the scorer that died or hung and were replaced
