"""When a run saves a checkpoint, what it adds to the trainer's state, and what the journal may
forget then.

Promise: no checkpoint is ahead of the journal. The journal reaches back to the checkpoint before
the newest one, in case the newest is damaged, unless only one is kept or space runs out. Runs on
the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from millrace.config import RunConfig
from millrace.config.training import CheckpointConfig
from millrace.controller.batches import Batches
from millrace.controller.policies import OtherPolicy, prune_others, save_others
from millrace.core.errors import CheckpointError, WorkerError
from millrace.training.checkpoints.store import CheckpointStore
from millrace.training.group import TrainerGroup

RETRY_DELAYS_S = (1.0, 4.0, 16.0, 60.0)


@dataclass(eq=False)
class CheckpointUploads:
    """Copies finished checkpoints to a store in the background.

    Promise: a store that cannot be used is a warning and never stops training; finish() raises if
    the newest checkpoint could not be stored. One checkpoint is uploaded at a time; of those that
    are finished meanwhile, the newest is next.
    """

    store: CheckpointStore
    _: KW_ONLY
    keep: int
    warn: Callable[[str], None]
    retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    num_failed: int = 0  # attempts
    stored: Path | None = None  # the newest that was stored
    _next: Path | None = None
    _uploading: asyncio.Task[None] | None = None
    _error: CheckpointError | None = None  # of the newest checkpoint

    def add(self, directory: Path) -> None:
        self._next = directory
        if self._uploading is None or self._uploading.done():
            self._uploading = asyncio.create_task(self._upload_all())

    async def finish(self) -> None:
        """Wait for all uploads."""
        if self._uploading is not None:
            await self._uploading
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give up what is not stored yet."""
        self.store.close()
        if self._uploading is not None:
            self._uploading.cancel()

    async def _upload_all(self) -> None:
        while (directory := self._next) is not None:
            self._next, self._error = None, None
            for delay_s in (*self.retry_delays_s, None):
                self._error = await self._upload(directory)
                if self._error is None or self._next is not None:
                    break
                if delay_s is not None:
                    await asyncio.sleep(delay_s)

    async def _upload(self, directory: Path) -> CheckpointError | None:
        try:
            await asyncio.to_thread(self.store.upload, directory, keep=self.keep)
        except CheckpointError as error:
            self.num_failed += 1
            if self._error is None:  # not again for each retry
                self.warn(f"{error} The run continues and tries again.")
            return error
        self.stored = directory
        return None


@dataclass(eq=False)
class Checkpointing:
    """Promise: a step waits for the copy of the trainer's state and never for the disk. One
    checkpoint is written at a time; another one that is due meanwhile is skipped and counted,
    except the last, which waits. `on_saved` is called when a checkpoint is on the disk. With
    several policies, a step does wait until those of the others are on the disk."""

    trainer: TrainerGroup
    _: KW_ONLY
    folder: Path
    warn: Callable[[str], None]
    version: InitVar[int] = 0  # of the checkpoint that the run resumes from; 0 = none
    settings: InitVar[CheckpointConfig | None] = None
    uploads: CheckpointUploads | None = None
    others: Sequence[OtherPolicy] = ()
    num_skipped: int = 0
    _writing: asyncio.Task[None] | None = None
    _version: int = 0  # of the checkpoint being written

    def __post_init__(self, version: int, settings: CheckpointConfig | None) -> None:
        self.newest = self.folder / f"step_{version}" if version else None  # on the disk
        if settings is not None and settings.path is not None:
            store = CheckpointStore(settings.path)
            self.uploads = CheckpointUploads(store, keep=settings.keep, warn=self.warn)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def save(
        self,
        version: int,
        *,
        run_state: dict[str, Any],
        on_saved: Callable[[], None],
        is_last: bool = False,
        activities: asyncio.TaskGroup | None = None,
    ) -> None:
        """Start a checkpoint and return once the trainer may continue. A failure is a warning. The
        last checkpoint is on the disk when this returns, and a failure is raised. What
        `on_saved` raises ends the `activities`."""
        if is_last:
            await self.finish_writing()
            await self._write(version, run_state, on_saved, is_last=True)
            return
        if self.is_writing:
            self.num_skipped += 1
            self.warn(
                f"The checkpoint of step {version} was skipped because that of step"
                f" {self._version} is still being written ({self.num_skipped} skipped so far);"
                " raise checkpoint.every_steps, or set run_dir to a faster disk."
            )
            return
        copied = asyncio.Event()

        async def write() -> None:
            try:
                await self._write(version, run_state, on_saved, on_copied=copied.set)
            # The supervisor reports and replaces a dead trainer.
            except (CheckpointError, WorkerError) as error:
                self.warn(f"{error} The run continues without the checkpoint of step {version}.")
            finally:
                copied.set()

        self._version = version
        self._writing = (activities or asyncio).create_task(write())
        await copied.wait()

    async def finish_writing(self) -> None:
        if self._writing is not None:
            await self._writing

    def begin_uploads(self) -> None:
        """Store the checkpoint that the run resumes from, unless the store has it."""
        if self.uploads is not None and self.newest is not None:
            self.uploads.add(self.newest)

    async def finish_uploads(self) -> None:
        """Wait until the newest checkpoint is in the store; raises if it cannot be stored."""
        if self.uploads is not None:
            await self.uploads.finish()

    def close(self) -> None:
        """Stop waiting for the checkpoint being written; the trainer finishes it if it can."""
        if self._writing is not None:
            self._writing.cancel()
        if self.uploads is not None:
            self.uploads.close()

    async def _write(
        self,
        version: int,
        run_state: dict[str, Any],
        on_saved: Callable[[], None],
        *,
        is_last: bool = False,
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        directory = self.folder / f"step_{version}"
        complaints = await save_others(self.others, directory.name, run_state=run_state)
        saved = await self.trainer.save(
            directory, run_state=run_state, is_last=is_last, on_copied=on_copied
        )
        complaints += await prune_others(self.others, first=self.folder)
        for complaint in filter(None, (*complaints, saved.complaint)):
            self.warn(complaint)
        self.newest = directory
        if self.uploads is not None:
            self.uploads.add(directory)
        on_saved()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPosition:
    """A checkpoint, and the journal's last record when it was made."""

    version: int
    position: int | None


@dataclass(kw_only=True, slots=True, eq=False)
class RunCheckpoints:
    config: RunConfig
    writer: Checkpointing
    batches: Batches
    policy: str
    newest: CheckpointPosition  # at first, of the checkpoint that the run resumes from
    on_checkpoint: Callable[[Path], None] = lambda path: None  # called when one is on the disk
    _trim_to: CheckpointPosition | None = None
    _trimming: asyncio.Task[None] | None = None

    async def after_step(self, version: int, activities: asyncio.TaskGroup) -> None:
        """Save if a checkpoint is due; the journal is trimmed in the background."""
        every = self.config.checkpoint.every_steps
        is_due = every > 0 and version % every == 0
        journal = self.batches.journal
        is_large = journal.is_too_large and not self.writer.is_writing
        is_last = version == self.config.trainer.steps
        if is_last or is_due or is_large:
            await self._save(version, activities, is_last=is_last)

    async def save_now(self, version: int, activities: asyncio.TaskGroup) -> None:
        """Have a checkpoint of this version on the disk and in the store, if the store answers."""
        await self.writer.finish_writing()
        if self.newest.version < version:
            await self._save(version, activities, is_last=True)
        with contextlib.suppress(CheckpointError):  # a warning has said so
            await self.writer.finish_uploads()

    async def _save(self, version: int, activities: asyncio.TaskGroup, *, is_last: bool) -> None:
        journal = self.batches.journal
        at = CheckpointPosition(version=version, position=journal.position)
        run_state = {
            "policy": self.policy,
            "policies": list(self.config.policies),
            "step": version,
            "journal": at.position,
            **self.batches.tracker.cursor(),
        }
        await journal.flush()
        await self.writer.save(
            version,
            run_state=run_state,
            on_saved=partial(self._saved, at, activities),
            is_last=is_last,
            activities=activities,
        )

    def _saved(self, at: CheckpointPosition, activities: asyncio.TaskGroup) -> None:
        before, self.newest = self.newest, at
        is_only_one = self.config.checkpoint.keep == 1 or self.batches.journal.is_too_large
        self._trim_to = at if is_only_one else before
        if self._trimming is None or self._trimming.done():
            self._trimming = activities.create_task(self._trim())
        assert self.writer.newest is not None, "it was saved just now"
        self.on_checkpoint(self.writer.newest)

    async def _trim(self) -> None:
        """Trim the journal; of checkpoints that are saved meanwhile, only the newest counts."""
        while (at := self._trim_to) is not None:
            self._trim_to = None
            if at.position is not None:
                await self.batches.journal.discard_covered(
                    at.version, position=at.position, keep=self.batches.replayable
                )
