"""Evaluates pinned versions, beside training, by engines that do nothing else.

They are brought a version only when one is due and the evaluation before it is over, and hold it
until its own is over; what falls due meanwhile is made up for by the next version published after
that. The last version is always evaluated.

Promise: training waits for no evaluation. A version's bytes are kept until these engines have it
(`done_with`), but never while an evaluation is under way, except those of the last version, when
nobody needs the room any more.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable

from millrace.core.weight_update import WeightUpdate
from millrace.rollout.evaluation import Evaluation


class Examiner:
    def __init__(
        self,
        *,
        swap: Callable[[WeightUpdate], Awaitable[int]],
        examine: Callable[[int], Awaitable[Evaluation]],
        every_steps: int,
        steps: int,
        version: int,
    ) -> None:
        """`swap` brings a version to the engines that evaluate, which hold `version` now;
        `examine` evaluates the one they hold."""
        self._swap = swap
        self._examine = examine
        self._every_steps = every_steps
        self._steps = steps
        self._taken = version  # the newest version that was accepted
        self._is_busy = True  # with the first version, until run() is through with it
        self._accepted: asyncio.Queue[WeightUpdate] = asyncio.Queue()  # two at most; see submit()
        self._needed: dict[int, asyncio.Event] = {}  # by version; set once its bytes are not
        self.before: Evaluation | None = None  # of the first version
        self.after: Evaluation | None = None  # of the last

    def submit(self, update: WeightUpdate) -> None:
        """The trainer has published this version: accept it if it is to be evaluated."""
        is_last = update.version == self._steps
        if is_last or (self._is_due(update.version) and not self._is_busy):
            self._taken, self._is_busy = update.version, True
            self._needed[update.version] = asyncio.Event()
            self._accepted.put_nowait(update)

    async def done_with(self, version: int) -> None:
        """Returns when the bytes of this version are not needed here."""
        if (is_fetched := self._needed.get(version)) is not None:
            await is_fetched.wait()

    async def run(self) -> None:
        """Evaluate the first version, those that fall due, and the last; ends with that."""
        self.before = await self._examine(self._taken)
        while self.after is None:
            self._is_busy = not self._accepted.empty()
            update = await self._accepted.get()
            version = await self._swap(update)
            assert version == update.version, "nobody else brings versions to these engines"
            self._needed.pop(version).set()
            evaluation = await self._examine(version)
            if version == self._steps:
                self.after = evaluation

    def _is_due(self, version: int) -> bool:
        """True if a step after which to evaluate was done since the last accepted version."""
        every = self._every_steps
        return every > 0 and version // every > self._taken // every
