"""When a run saves a checkpoint, what it adds to the trainer's state, and what the journal may
forget then.

Promise: no checkpoint is ahead of the journal. The journal reaches back to the checkpoint before
the newest one, in case the newest is damaged, unless only one is kept or space runs out.

Runs on the controller's event loop.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from millrace.config import RunConfig
from millrace.controller.batches import Batches
from millrace.training.checkpoints.schedule import Checkpointing


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """A checkpoint, and the journal's last record when it was made."""

    version: int
    position: int | None


@dataclass(kw_only=True, slots=True, eq=False)
class RunCheckpoints:
    config: RunConfig
    writer: Checkpointing
    batches: Batches
    policy: str
    covered: Covered  # by the newest checkpoint; at first, the one that the run resumes from
    _to_cover: Covered | None = None
    _covering: asyncio.Task[None] | None = None

    async def after_step(self, version: int, activities: asyncio.TaskGroup) -> None:
        """Save if a checkpoint is due; the journal is trimmed in the background."""
        every = self.config.checkpoint.every_steps
        is_due = every > 0 and version % every == 0
        journal = self.batches.journal
        is_large = journal.is_too_large and not self.writer.is_writing
        is_last = version == self.config.trainer.steps
        if not (is_last or is_due or is_large):
            return
        at = Covered(version=version, position=journal.position)
        run_state = {
            "policy": self.policy,
            "version": version,
            "journal": at.position,
            **self.batches.tracker.cursor(),
        }
        await journal.flush()
        on_saved = partial(self._saved, at, activities)
        await self.writer.save(version, run_state=run_state, on_saved=on_saved, is_last=is_last)

    def _saved(self, at: Covered, activities: asyncio.TaskGroup) -> None:
        before, self.covered = self.covered, at
        is_only_one = self.config.checkpoint.keep == 1 or self.batches.journal.is_too_large
        self._to_cover = at if is_only_one else before
        if self._covering is None or self._covering.done():
            self._covering = activities.create_task(self._cover())

    async def _cover(self) -> None:
        """Trim the journal; of checkpoints that are saved meanwhile, only the newest counts."""
        while (covered := self._to_cover) is not None:
            self._to_cover = None
            if covered.position is not None:
                await self.batches.journal.discard_covered(
                    covered.version, position=covered.position, keep=self.batches.may_return
                )
