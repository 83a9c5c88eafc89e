"""The restart policy: how long to wait before a restart, and when to stop trying.

Promise: one policy holds for every supervised process. The wait doubles with each failure within
the window; one failure too many raises RestartLimitExceeded with the times of all of them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millrace.core.errors import RestartLimitExceeded, WorkerError

MAX_BACKOFF_S = 60.0
# Only failures in quick succession make the wait longer: a worker that served for a while before
# it died does not wait for deaths that are long past.
BACKOFF_WINDOW_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    max_restarts: int = 5  # within window_s
    window_s: float = 600.0
    backoff_s: float = 0.5  # before a restart; doubles with each failure within BACKOFF_WINDOW_S


class RestartHistory:
    """Recent failures of one supervised process."""

    def __init__(
        self, name: str, *, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._policy = policy
        self._clock = clock
        self._created_s = clock()
        self._recent: deque[float] = deque()  # times of failures, by the clock

    def add(self, error: Exception) -> float:
        """Record a death or a failed start; returns the seconds to wait before the next start.
        Raises RestartLimitExceeded if there were too many within the window."""
        now_s = self._clock()
        self._recent.append(now_s)
        while now_s - self._recent[0] > self._policy.window_s:
            self._recent.popleft()
        if len(self._recent) > self._policy.max_restarts:
            raise self._limit_exceeded(error)
        num_close = sum(now_s - failed_s <= BACKOFF_WINDOW_S for failed_s in self._recent)
        return min(self._policy.backoff_s * 2 ** (num_close - 1), MAX_BACKOFF_S)

    def _limit_exceeded(self, error: Exception) -> RestartLimitExceeded:
        count = "once" if len(self._recent) == 1 else f"{len(self._recent)} times"
        times = ", ".join(f"{at_s - self._created_s:.1f}" for at_s in self._recent)
        return RestartLimitExceeded(
            f"Worker {self._name!r} failed {count} within {self._policy.window_s:g} s"
            f" ({times} s after its first start), more often than supervision.max_restarts ="
            f" {self._policy.max_restarts} allows; the last error: {error}",
            worker=self._name,
            traceback=error.traceback if isinstance(error, WorkerError) else "",
        )
