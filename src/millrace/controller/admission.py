"""The gate in front of generation: no group starts that is bound to be too stale.

Promise: accepted groups never exceed (max_staleness + visible version + 1) * groups_per_step. If
the buffer hands out the oldest group first, a group that starts now is trained at most
max_staleness versions later. The visible version is what the engines hold, not what the trainer has
reached: a slot freed at the step, before the swap, would start a rollout that is already one
version old. If a single stale token rules a group out, no group starts either while the engines are
so far behind the next take that its first token would be too stale for it.

Called from the controller's event loop only.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from millrace.core.clock import REAL_CLOCK, Clock
from millrace.core.staleness import StalenessLimit

STALENESS = "staleness limit"
RUNNING = "max_running_groups"


class Admission:
    def __init__(
        self,
        *,
        groups_per_step: int,
        limit: StalenessLimit,
        max_running: int,
        version: int,
        begun: int = 0,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`begun`: groups in steps after `version` that a resumed run repeats."""
        self._groups_per_step = groups_per_step
        self._limit = limit
        self._max_running = max_running
        self._version = version  # held by all engines
        self._next_take = version  # trainer version of the next take
        # Trained, waiting or running; not dropped or failed.
        self._accepted = version * groups_per_step + begun
        self._running = 0
        self._changed = asyncio.Event()
        self._clock = clock
        self.held_by: str | None = None  # why the next group may not start yet
        self.held_s: defaultdict[str, float] = defaultdict(float)  # total wait, by reason
        self.on_leave: Callable[[], None] = lambda: None  # called when a running group leaves

    @property
    def running(self) -> int:
        return self._running

    @property
    def is_full(self) -> bool:
        """True if no other group may start now."""
        return self._obstacle() is not None

    async def enter(self) -> None:
        """Wait until one more group may start, and count it."""
        while (reason := self._obstacle()) is not None:
            self.held_by = reason
            self._changed.clear()
            began_s = self._clock.now()
            await self._changed.wait()
            self.held_s[reason] += self._clock.now() - began_s
        self.held_by = None
        self.readmit()

    def readmit(self) -> None:
        """Count a group without a check: it was admitted before a crash."""
        self._accepted += 1
        self._running += 1

    def leave(self) -> None:
        """A running group has reached the buffer or has ended."""
        self._running -= 1
        self._changed.set()
        self.on_leave()

    def give_back(self) -> None:
        """An accepted group will not be trained; another may take its place."""
        self._accepted -= 1
        self._changed.set()

    def replay(self, num_groups: int) -> None:
        """Count groups of a step that were trained before and need no generation."""
        self._accepted += num_groups

    def advance(self, version: int) -> None:
        """All engines now sample with this version or a newer one."""
        self._version = max(self._version, version)
        self._changed.set()

    def take_next(self, version: int) -> None:
        """Groups that start from now on are trained at this trainer version or later."""
        self._next_take = version

    def _obstacle(self) -> str | None:
        limit = self._limit
        most = (limit.max_staleness + self._version + 1) * self._groups_per_step
        starts_too_old = self._version < limit.oldest_at(self._next_take)
        if self._accepted >= most or (starts_too_old and limit.one_token_decides):
            return STALENESS
        if self._running >= self._max_running:
            return RUNNING
        return None
