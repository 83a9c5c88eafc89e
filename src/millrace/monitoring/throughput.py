"""Samples per second and tokens per second: the one definition that all reports share.

A sample is an episode that was trained on; a replayed group does not count again. A token is one
that a rollout engine generated. Time starts when training begins, so start-up and the evaluation
before the first step do not count. A resumed run continues the totals of its metrics.jsonl.

Called from the controller's event loop.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

WINDOW_S = 10.0  # the current rates cover whole steps and at least this much time, if there is any
MAX_MARKS = 200


class _Mark(NamedTuple):
    """Totals when a step ended; a rate is the difference of two marks."""

    time_s: float
    samples: int
    tokens: int


class Throughput:
    """`earlier` is the last metrics row of the run that this one resumes."""

    def __init__(
        self, *, earlier: Mapping[str, Any] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        earlier = earlier or {}
        self._now = now
        self._earlier_s: float = earlier.get("throughput/time_s", 0.0)
        self._earlier_tokens: int = earlier.get("throughput/tokens", 0)
        self._reported: dict[str, int] = {}  # tokens by engine, as its process counts them
        self.samples: int = earlier.get("throughput/samples", 0)
        self.begin()

    def begin(self) -> None:
        """Training begins now; tokens generated before do not count."""
        self.tokens = self._earlier_tokens
        self._began_s = self._now()
        self._marks = [self._mark()]

    def report(self, engine: str, tokens: int) -> None:
        """`tokens`: what this engine's process has generated since it started."""
        before = self._reported.get(engine, 0)
        self.tokens += tokens - before if tokens >= before else tokens  # less: a new process
        self._reported[engine] = tokens

    def step(self, samples: int) -> None:
        """A step has trained on this many samples."""
        self.samples += samples
        self._marks = [*self._marks[-MAX_MARKS:], self._mark()]

    def current(self) -> dict[str, float]:
        """Rates of the most recent steps; before the first step, of the time since the start."""
        end = self._marks[-1] if len(self._marks) > 1 else self._mark()
        old = [mark for mark in self._marks if mark.time_s <= end.time_s - WINDOW_S]
        start = old[-1] if old else self._marks[0]
        seconds = max(end.time_s - start.time_s, 1e-9)
        return {
            "samples_per_s": (end.samples - start.samples) / seconds,
            "tokens_per_s": (end.tokens - start.tokens) / seconds,
        }

    def row(self) -> dict[str, float]:
        """For metrics.jsonl, after step()."""
        last = self._marks[-1]
        return {
            **self.current(),
            "samples": last.samples,
            "tokens": last.tokens,
            "time_s": round(self._earlier_s + last.time_s - self._began_s, 3),
        }

    def eta_s(self, steps_left: int) -> float | None:
        """Estimated seconds to the last step; None before the first one."""
        if len(self._marks) < 2:
            return None
        per_step_s = (self._marks[-1].time_s - self._marks[0].time_s) / (len(self._marks) - 1)
        return per_step_s * steps_left

    def _mark(self) -> _Mark:
        return _Mark(time_s=self._now(), samples=self.samples, tokens=self.tokens)


def run_rates(row: Mapping[str, Any]) -> dict[str, float]:
    """The mean rates of a whole run, from its last metrics row; {} if the row has no totals."""
    seconds = row.get("throughput/time_s")
    if not seconds:
        return {}
    return {
        "samples_per_s": row["throughput/samples"] / seconds,
        "tokens_per_s": row["throughput/tokens"] / seconds,
    }
