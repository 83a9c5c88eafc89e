"""The gate in front of generation: no work is started that is bound to be too stale.

Promise: groups accepted or running never exceed (max_staleness + visible version + 1) *
groups_per_step. With the buffer handing out oldest first, a group started now is then trained at
most max_staleness versions later, and by no measure too stale. The visible version is what the
engines hold, not what the trainer has reached: a slot freed at the step, before the swap, would
start a rollout that is already one version old. Nor does a group start while the engines are so far
behind the next take that its first token would be too old for it, where that alone decides.

Called from the controller's event loop only.
"""

import asyncio
from collections.abc import Callable

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
    ) -> None:
        """`begun`: groups of steps beyond `version` that a resumed run redoes."""
        self._groups_per_step = groups_per_step
        self._limit = limit
        self._max_running = max_running
        self._version = version
        self._taking = version  # of the take that comes next
        # Trained, waiting or running; not dropped or failed.
        self._accepted = version * groups_per_step + begun
        self._running = 0
        self._changed = asyncio.Event()
        self.held_by: str | None = None  # why the next group may not start yet
        self.on_leave: Callable[[], None] = lambda: None  # told of each group that leaves

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
            await self._changed.wait()
        self.held_by = None
        self._accepted += 1
        self._running += 1

    def enter_again(self) -> None:
        """Count a group that was let in before a crash, and waits for its place in the buffer."""
        self._accepted += 1
        self._running += 1

    def leave(self) -> None:
        """A running group reached the buffer, or failed."""
        self._running -= 1
        self._changed.set()
        self.on_leave()

    def give_back(self) -> None:
        """An accepted group will never be trained (failed or dropped); another may take its
        place."""
        self._accepted -= 1
        self._changed.set()

    def replay(self, num_groups: int) -> None:
        """So many places of a step are taken by groups that were trained before."""
        self._accepted += num_groups

    def advance(self, version: int) -> None:
        """All engines now sample with this version or a newer one."""
        self._version = max(self._version, version)
        self._changed.set()

    def take_next(self, version: int) -> None:
        """What starts from now on is trained at this version of the trainer or later."""
        self._taking = version

    def _obstacle(self) -> str | None:
        most = (self._limit.max_staleness + self._version + 1) * self._groups_per_step
        if self._accepted >= most or self._starts_too_old():
            return STALENESS
        if self._running >= self._max_running:
            return RUNNING
        return None

    def _starts_too_old(self) -> bool:
        is_too_old = self._version < self._limit.oldest_at(self._taking)
        return is_too_old and self._limit.one_token_decides
