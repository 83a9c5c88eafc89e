"""Writes checkpoints while training continues.

Promise: begin() does not wait for the disk, unless the checkpoint before is still being written:
one snapshot exists at a time. The result of each checkpoint is reported exactly once.

Threads: the trainer's thread calls begin() and wait(); a thread per checkpoint writes it and
reports.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import CheckpointError
from millrace.training.checkpoints.directory import prune_checkpoints, write_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointResult:
    """How the writing of a checkpoint ended."""

    error: BaseException | None = None  # set = nothing was written or changed
    complaint: str | None = None  # it was written, but older ones could not be removed


class CheckpointWriter:
    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._good: set[str] = set()  # step_N known to be undamaged; used by the thread only
        self._thread: threading.Thread | None = None

    def begin(
        self,
        directory: Path,
        *,
        write: Callable[[Path], None],
        run_state: dict[str, Any],
        needed_bytes: int,
        on_done: Callable[[CheckpointResult], None],
    ) -> None:
        """Start a thread that fills `directory` with what `write` puts into a folder and with the
        run state, removes old checkpoints, and calls `on_done`."""

        def work() -> None:
            on_done(self._write(directory, write, run_state=run_state, needed_bytes=needed_bytes))

        self.wait()
        # Not a daemon: a process that exits finishes its checkpoint first.
        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Block until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        directory: Path,
        write: Callable[[Path], None],
        *,
        run_state: dict[str, Any],
        needed_bytes: int,
    ) -> CheckpointResult:
        self._good.discard(directory.name)
        try:
            write_checkpoint(directory, write=write, run_state=run_state, needed_bytes=needed_bytes)
        except Exception as error:  # noqa: BLE001 - the caller's process raises it
            return CheckpointResult(error=error)
        self._good.add(directory.name)
        try:
            prune_checkpoints(directory.parent, keep=self._keep, good=self._good)
        except CheckpointError as error:
            return CheckpointResult(complaint=str(error))
        return CheckpointResult()
