"""A circuit breaker: after so many failures in a row nobody is asked for a while, then one call
goes first.

Pure but for its clock; called from the controller's event loop.
"""

import time
from collections.abc import Callable


class Breaker:
    def __init__(
        self, *, failures: int, open_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`failures` in a row open it for `open_s`; with 0 it never opens."""
        self.num_opened = 0
        self._failures = failures
        self._open_s = open_s
        self._now = now
        self._num_failed = 0  # in a row
        self._until_s: float | None = None  # when the probe may go; None = closed
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        return self._until_s is not None

    def wait_s(self) -> float | None:
        """Until the next call may go; None = not before the one that went first is back."""
        if self._until_s is None:
            return 0.0
        return None if self._is_probing else max(0.0, self._until_s - self._now())

    def begin(self) -> bool:
        """A call goes now; True = it is the one that goes first."""
        assert self.wait_s() == 0.0
        self._is_probing = self.is_open
        return self._is_probing

    def answered(self) -> None:
        """Somebody is there, whatever the answer was."""
        self._num_failed = 0
        self._until_s = None
        self._is_probing = False

    def failed(self, *, is_probe: bool, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: what was said about when to come again."""
        self._num_failed += 1
        wait_s = self._open_s if retry_after_s is None else retry_after_s
        if is_probe:
            self._is_probing = False
        elif self.is_open:  # a call that was under way when it opened
            wait_s = retry_after_s or 0.0
        elif not 0 < self._failures <= self._num_failed:
            return
        else:
            self.num_opened += 1
        self._until_s = max(self._until_s or 0.0, self._now() + wait_s)

    def abandoned(self, *, is_probe: bool) -> None:
        """The call was given up by its caller, and says nothing."""
        if is_probe:
            self._is_probing = False
