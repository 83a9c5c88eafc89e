"""The gates in front of generation: admission by staleness, and the barrier of synchronous runs.

Promise of admission: accepted groups never exceed (max_staleness + visible version + 1) *
groups_per_step. If the buffer hands out the oldest group first, a group that starts now is trained
at most max_staleness versions later. The visible version is what the engines hold: a slot freed at
the step, before the swap, would start a rollout that is already one version old. If one stale token
rules a group out, no group starts whose first token would be too stale for the next take. A limit
that is enforced only at take() leaves max_running as the only gate.

Promise of the barrier: all groups of a round start at once, in the order in which they were issued,
while nothing else is being generated or scored. Which sequences an engine batches together decides
how its sums are rounded; with the barrier that does not depend on when requests arrive. Failed
groups are replaced in a later round. Called from the controller's event loop only.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field

from millrace.core.staleness import StalenessLimit

STALENESS = "staleness limit"
RUNNING = "max_running_groups"


@dataclass(kw_only=True, eq=False)
class Admission:
    groups_per_step: int
    limit: StalenessLimit
    max_running: int
    version: int  # held by all engines
    begun: InitVar[int] = 0  # groups in steps after `version` that a resumed run repeats
    now: Callable[[], float] = time.monotonic
    running: int = 0  # groups
    held_by: str | None = None  # why the next group may not start yet
    # Total wait, by reason.
    held_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    on_leave: Callable[[], None] = lambda: None  # called when a running group leaves

    def __post_init__(self, begun: int) -> None:
        self._next_take = self.version  # trainer version of the next take
        # Trained, waiting or running; not dropped or failed.
        self._accepted = self.version * self.groups_per_step + begun
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._obstacle() is not None

    async def enter(self) -> None:
        """Wait until one more group may start, and count it."""
        while (reason := self._obstacle()) is not None:
            self.held_by = reason
            self._changed.clear()
            began_s = self.now()
            await self._changed.wait()
            self.held_s[reason] += self.now() - began_s
        self.held_by = None
        self.readmit()

    def readmit(self) -> None:
        """Count a group without a check: it was admitted before a crash."""
        self._accepted += 1
        self.running += 1

    def leave(self) -> None:
        """A running group has reached the buffer or has ended."""
        self.running -= 1
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
        self.version = max(self.version, version)
        self._changed.set()

    def take_next(self, version: int) -> None:
        """Groups that start from now on are trained at this trainer version or later."""
        self._next_take = version

    def _obstacle(self) -> str | None:
        limit = self.limit
        most = (limit.max_staleness + self.version + 1) * self.groups_per_step
        starts_too_old = self.version < limit.oldest_at(self._next_take)
        is_ahead = self._accepted >= most and not limit.only_at_take
        if is_ahead or (starts_too_old and limit.one_token_decides):
            return STALENESS
        if self.running >= self.max_running:
            return RUNNING
        return None


@dataclass(eq=False)
class SyncBarrier:
    admission: Admission
    _: KW_ONLY
    # A context in which engines only collect requests; see EnginePool.together.
    together: Callable[[], AbstractAsyncContextManager[None]]
    _waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    _is_open: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.admission.on_leave = self._changed.set

    async def wait(self) -> None:
        """Wait for the next round. The caller must then send its request before any other await."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._changed.set()
        try:
            await turn
        finally:
            if turn in self._waiting:  # cancelled
                self._waiting.remove(turn)

    def open(self) -> None:
        """Allow rounds to start, until close()."""
        self._is_open = True
        self._changed.set()

    def close(self) -> None:
        self._is_open = False

    async def run(self) -> None:
        """Start each round when it is complete, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            # A round is complete if every group that may run now waits here.
            all_wait = len(self._waiting) == self.admission.running and self.admission.is_full
            if self._is_open and self._waiting and all_wait:
                async with self.together():
                    turns, self._waiting = self._waiting, []
                    for turn in turns:
                        turn.set_result(None)
