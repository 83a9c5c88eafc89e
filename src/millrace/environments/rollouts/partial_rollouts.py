"""Partial rollouts: the tokens of unfinished groups, saved to the journal every few seconds.

Promise: tokens are durable about `every_s` after they were sampled, and each is saved once. After a
crash, requests that are repeated resume from the saved tokens. At most one save of each group is
under way, and training waits for none. Runs on the controller's event loop; encoding and the disk
belong to the journal's thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from millrace.environments.rollouts.attempt import Attempt, IsTrainable, PartialRollout
from millrace.journal import Journal, NoJournal


class PartialRollouts:
    """The partial rollouts of all unfinished groups."""

    def __init__(self, journal: Journal | NoJournal, *, every_s: float) -> None:
        """`every_s` = 0: nothing is saved, and nothing resumed."""
        self._journal = journal
        self._every_s = every_s
        self._open: dict[int, tuple[Attempt, PartialRollout]] = {}  # by number
        self._num_resumed = 0  # tokens, in attempts that are over

    @property
    def num_resumed(self) -> int:
        """Tokens so far that were not sampled again after a crash."""
        return self._num_resumed + sum(partial.num_resumed for _, partial in self._open.values())

    @contextlib.asynccontextmanager
    async def open(self, attempt: Attempt, *, is_trainable: IsTrainable) -> AsyncIterator[None]:
        """Enclose the sampling and scoring of a group; sets `attempt.partial`."""
        if not self._every_s:
            yield
            return
        saved = await self._journal.read_tokens(attempt.number)
        partial = attempt.partial = PartialRollout(saved, is_trainable=is_trainable)
        self._open[attempt.number] = attempt, partial
        try:
            yield
        finally:
            del self._open[attempt.number]
            self._num_resumed += partial.num_resumed

    async def run(self) -> None:
        """Save new tokens every `every_s`. Ends only by cancellation."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            await self.save()

    async def save(self) -> None:
        """Returns when all tokens so far are durable."""
        saving = [self._save(attempt, partial) for attempt, partial in self._open.values()]
        await asyncio.gather(*saving)

    async def _save(self, attempt: Attempt, partial: PartialRollout) -> None:
        if tokens := partial.take_new():
            await self._journal.append_tokens(attempt.number, tries=attempt.tries, tokens=tokens)
