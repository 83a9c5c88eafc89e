"""The courses of all groups in flight, written to the journal now and then.

Promise: what a group was told is durable `every_s` later, or a little more; each token is written
once. At most one part of each group is on its way to the disk, and training waits for none.
Runs on the controller's event loop; encoding and the disk are the journal's thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from millrace.environments.rollouts.attempt import Attempt, IsFit, PartialRollout
from millrace.journal import Journal, NoJournal


class PartialRollouts:
    def __init__(self, journal: Journal | NoJournal, *, every_s: float) -> None:
        """`every_s` = 0: nothing is written down, and nothing recalled."""
        self._journal = journal
        self._every_s = every_s
        self._open: dict[int, tuple[Attempt, PartialRollout]] = {}  # by number
        self._num_resumed = 0  # tokens, in attempts that are over

    @property
    def num_resumed(self) -> int:
        """Tokens so far that were not sampled again after a crash."""
        return self._num_resumed + sum(course.num_given for _, course in self._open.values())

    @contextlib.asynccontextmanager
    async def opened(self, attempt: Attempt, *, is_fit: IsFit) -> AsyncIterator[None]:
        """While the group is played and scored; begins with what was told before a crash."""
        if not self._every_s:
            yield
            return
        known = await self._journal.read_tokens(attempt.number)
        course = attempt.course = PartialRollout(known, is_fit=is_fit)
        self._open[attempt.number] = attempt, course
        try:
            yield
        finally:
            del self._open[attempt.number]
            self._num_resumed += course.num_given

    async def run(self) -> None:
        """Write down what is new, again and again. Ends only by cancellation."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            await self.write()

    async def write(self) -> None:
        """Returns when all that was told so far is durable."""
        writing = [self._write(attempt, course) for attempt, course in self._open.values()]
        await asyncio.gather(*writing)

    async def _write(self, attempt: Attempt, course: PartialRollout) -> None:
        if tokens := course.take():
            await self._journal.append_tokens(attempt.number, tries=attempt.tries, tokens=tokens)
