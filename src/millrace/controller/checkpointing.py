"""When a run saves a checkpoint, what it adds to the trainer's state, and what the journal may
forget then.

Promise: no checkpoint is ahead of the journal. The journal reaches back to the checkpoint before
the newest one, in case the newest is damaged, unless only one is kept or space runs out.

Runs on the controller's event loop.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from millrace.config import RunConfig
from millrace.controller.batches import Batches
from millrace.controller.group_tracker import GroupTracker
from millrace.journal import Journal, NoJournal
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.schedule import Checkpointing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Covered:
    """A checkpoint, and the journal's last record when it was made."""

    version: int
    position: int | None


class RunCheckpoints:
    def __init__(
        self,
        config: RunConfig,
        *,
        writer: Checkpointing,
        journal: Journal | NoJournal,
        batches: Batches,
        tracker: GroupTracker,
        tasks: TaskStream,
        policy: str,
        version: int,
        position: int | None,
    ) -> None:
        """`version` and `position` in the journal of the checkpoint that the run resumes from."""
        self._settings = config.checkpoint
        self._steps = config.trainer.steps
        self._writer = writer
        self._journal = journal
        self._batches = batches
        self._tracker = tracker
        self._tasks = tasks
        self._policy = policy
        self._covered = _Covered(version=version, position=position)
        self._to_cover: _Covered | None = None
        self._covering: asyncio.Task[None] | None = None

    @property
    def newest(self) -> Path | None:
        return self._writer.newest

    def close(self) -> None:
        self._writer.close()

    async def after_step(self, version: int, activities: asyncio.TaskGroup) -> None:
        """Save if a checkpoint is due; the journal is trimmed in the background."""
        every = self._settings.every_steps
        is_due = every > 0 and version % every == 0
        is_large = self._journal.is_too_large and not self._writer.is_writing
        is_last = version == self._steps
        if not (is_last or is_due or is_large):
            return
        at = _Covered(version=version, position=self._journal.position)
        run_state = {
            "policy": self._policy,
            "version": version,
            "journal": at.position,
            **self._tracker.cursor(),
            "tasks": self._tasks.state(),
        }
        await self._journal.flush()
        save = self._writer.save_last if is_last else self._writer.save
        await save(version, run_state=run_state, on_saved=lambda: self._saved(at, activities))

    def _saved(self, at: _Covered, activities: asyncio.TaskGroup) -> None:
        before, self._covered = self._covered, at
        is_only_one = self._settings.keep == 1 or self._journal.is_too_large
        self._to_cover = at if is_only_one else before
        if self._covering is None or self._covering.done():
            self._covering = activities.create_task(self._cover())

    async def _cover(self) -> None:
        """Trim the journal; of checkpoints that are saved meanwhile, only the newest counts."""
        while (covered := self._to_cover) is not None:
            self._to_cover = None
            if covered.position is not None:
                await self._journal.discard_covered(
                    covered.version, position=covered.position, keep=self._batches.may_return
                )
