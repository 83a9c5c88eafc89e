"""How often one client may ask: so many requests each second, and a second's worth at once.

Bounds: the newest MAX_CLIENTS are remembered; who was forgotten starts anew. Runs on the server's
loop.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CLIENTS = 4096


class RateLimit:
    """A bucket for each client, which a request takes one from and time fills."""

    def __init__(self, per_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._room = max(per_s, 1.0)
        self._now_s = now_s
        # client -> what was left, and when; who asked last stands last
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Count a request; 0 = it may pass, else the seconds until one may."""
        now = self._now_s()
        left, since = self._left.pop(client, (self._room, now))
        left = min(self._room, left + (now - since) * self._per_s)
        passes = left >= 1.0
        self._left[client] = (left - 1.0 if passes else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if passes else (1.0 - left) / self._per_s
