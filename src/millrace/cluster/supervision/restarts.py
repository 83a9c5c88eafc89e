"""How often one worker has died lately, and whether that is too often."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millrace.core.errors import GivenUp, WorkerError

LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartLimits:
    max_restarts: int  # within window_s
    window_s: float
    backoff_s: float  # before the first; doubled with each


class RestartHistory:
    def __init__(
        self, name: str, *, limits: RestartLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._limits = limits
        self._clock = clock
        self._began_s = clock()
        self._recent: deque[float] = deque()  # when, by the clock

    def note(self, error: Exception) -> float:
        """It has died, or could not be started; returns how long to wait before the next attempt.
        Raises GivenUp if it has died too often."""
        now_s = self._clock()
        self._recent.append(now_s)
        while now_s - self._recent[0] > self._limits.window_s:
            self._recent.popleft()
        if len(self._recent) > self._limits.max_restarts:
            raise self._given_up(error)
        doubled_s = self._limits.backoff_s * 2 ** (len(self._recent) - 1)
        return min(doubled_s, LONGEST_BACKOFF_S)

    def _given_up(self, error: Exception) -> GivenUp:
        times = "once" if len(self._recent) == 1 else f"{len(self._recent)} times"
        when = ", ".join(f"{at_s - self._began_s:.1f}" for at_s in self._recent)
        return GivenUp(
            f"Worker {self._name!r} died {times} within {self._limits.window_s:g} s"
            f" ({when} s after it was first up), more often than supervision.max_restarts ="
            f" {self._limits.max_restarts} allows; the last time: {error}",
            worker=self._name,
            traceback=error.traceback if isinstance(error, WorkerError) else "",
        )
