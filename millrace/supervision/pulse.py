"""Whether a worker that has something to do gets on with it. That it is alive is another matter."""

import time
from collections.abc import Callable


class Pulse:
    def __init__(
        self,
        *,
        timeout_s: float,
        first_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_timeout_s`: until it has done anything; it may have to compile first."""
        self._timeout_s = timeout_s
        self._first_timeout_s = max(timeout_s, first_timeout_s)
        self._clock = clock
        self._moved_s = clock()
        self._work: float | None = None  # as last told
        self._has_begun = False

    def heard(self, *, work: float, waits: bool) -> None:
        """The worker tells how much it has done, and whether it waits for something else."""
        has_moved = work != self._work
        self._has_begun |= has_moved and self._work is not None
        self._work = work
        if has_moved or waits:
            self._moved_s = self._clock()

    def hung_s(self, *, is_asked: bool) -> float | None:
        """For how long it has made no progress, if that is too long. Looked at every now and then:
        while nobody asks it for anything, it has no reason to make any."""
        now_s = self._clock()
        if not is_asked:
            self._moved_s = now_s
        limit_s = self._timeout_s if self._has_begun else self._first_timeout_s
        still_s = now_s - self._moved_s
        return still_s if still_s >= limit_s else None
