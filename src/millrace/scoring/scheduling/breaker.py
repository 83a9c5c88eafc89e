"""A circuit breaker: after several consecutive failures calls wait, then one probe call goes first.

Pure except for its clock. Called from the controller's event loop.
"""

import time
from collections.abc import Callable


class Breaker:
    def __init__(
        self, *, failures: int, open_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`failures` consecutive failures open it for `open_s`; 0 never opens it."""
        self.num_opened = 0
        self._failures = failures
        self._open_s = open_s
        self._now = now
        self._num_failed = 0  # consecutive
        self._probe_at_s: float | None = None  # earliest time of the probe; None = closed
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        return self._probe_at_s is not None

    def wait_s(self) -> float | None:
        """Seconds until the next call may start; None until the probe under way has ended."""
        if self._probe_at_s is None:
            return 0.0
        return None if self._is_probing else max(0.0, self._probe_at_s - self._now())

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
        wait_s = self._open_s if retry_after_s is None else retry_after_s
        if is_probe:
            self._is_probing = False
        elif self.is_open:  # this call was in flight when the breaker opened
            wait_s = retry_after_s or 0.0
        elif not 0 < self._failures <= self._num_failed:
            return
        else:
            self.num_opened += 1
        self._probe_at_s = max(self._probe_at_s or 0.0, self._now() + wait_s)

    def abandoned(self, *, is_probe: bool) -> None:
        """The caller cancelled the call, so its outcome is unknown."""
        if is_probe:
            self._is_probing = False
