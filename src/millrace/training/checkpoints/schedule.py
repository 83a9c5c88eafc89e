"""When checkpoints are made, as the controller sees it.

Promise: a step waits for the copy of the trainer's state and never for the disk. One checkpoint is
in the making at a time; one that is due meanwhile is skipped and counted, except for the last,
which is waited for. Whoever asks for one hears, by `on_saved`, that it is on the disk.
Lives on the controller's event loop. Torch-free.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.core.errors import CheckpointError, WorkerError
from millrace.training.group import TrainerGroup


class Checkpointing:
    def __init__(
        self,
        trainer: TrainerGroup,
        *,
        folder: Path,
        warn: Callable[[str], None],
        version: int = 0,
    ) -> None:
        """`version` of the checkpoint that the run goes on from; 0 = there is none."""
        self.newest = folder / f"step_{version}" if version else None  # on the disk
        self.num_skipped = 0
        self._trainer = trainer
        self._folder = folder
        self._warn = warn
        self._writing: asyncio.Task[None] | None = None
        self._version = 0  # that is being written

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def save(
        self, version: int, *, run_state: dict[str, Any], on_saved: Callable[[], None]
    ) -> None:
        """Begin a checkpoint and return once the trainer may go on; what fails is a warning."""
        if self.is_writing:
            self.num_skipped += 1
            self._warn(
                f"The checkpoint of step {version} was skipped, because that of step"
                f" {self._version} is still being written ({self.num_skipped} skipped so far);"
                " raise checkpoint.every_steps, or set run_dir to a faster disk."
            )
            return
        copied = asyncio.Event()
        self._version = version
        self._writing = asyncio.create_task(self._try(version, run_state, on_saved, copied))
        await copied.wait()

    async def save_last(
        self, version: int, *, run_state: dict[str, Any], on_saved: Callable[[], None]
    ) -> None:
        """Write a checkpoint and return once it is on the disk; raises if that fails."""
        if self._writing is not None:
            await self._writing
        await self._write(version, run_state, on_saved, is_last=True)

    def close(self) -> None:
        """Hear no more of what is being written; the trainer finishes it if it can."""
        if self._writing is not None:
            self._writing.cancel()

    async def _try(
        self,
        version: int,
        run_state: dict[str, Any],
        on_saved: Callable[[], None],
        copied: asyncio.Event,
    ) -> None:
        try:
            await self._write(version, run_state, on_saved, on_copied=copied.set)
        # If the trainer is dead, that is for its owner to say, and to do something about.
        except (CheckpointError, WorkerError) as error:
            self._warn(f"{error} The run goes on without the checkpoint of step {version}.")
        finally:
            copied.set()

    async def _write(
        self,
        version: int,
        run_state: dict[str, Any],
        on_saved: Callable[[], None],
        *,
        is_last: bool = False,
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        directory = self._folder / f"step_{version}"
        saved = await self._trainer.save(
            directory, run_state=run_state, is_last=is_last, on_copied=on_copied
        )
        if saved.complaint is not None:
            self._warn(saved.complaint)
        self.newest = directory
        on_saved()
