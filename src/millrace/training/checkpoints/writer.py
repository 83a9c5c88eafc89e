"""Checkpoints are written beside training.

Promise: whoever begins a checkpoint waits for no disk, unless the one before is still being
written: one snapshot exists at a time. How each ended is told exactly once.

Threads: begin and wait are called by the trainer's thread; a thread per checkpoint writes it and
tells.
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
    """What became of a checkpoint."""

    error: BaseException | None = None  # set: there is none, and the folder is as it was
    complaint: str | None = None  # it is safe, but older ones could not be removed


class CheckpointWriter:
    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._good: set[str] = set()  # step_N that this process wrote or has read; the thread's own
        self._thread: threading.Thread | None = None

    def begin(
        self,
        directory: Path,
        *,
        write: Callable[[Path], None],
        run_state: dict[str, Any],
        needed_bytes: int,
        tell: Callable[[CheckpointResult], None],
    ) -> None:
        """Make `directory` hold what `write` puts into the folder it is given, and the run state;
        then remove what is too old."""

        def work() -> None:
            tell(self._write(directory, write, run_state=run_state, needed_bytes=needed_bytes))

        self.wait()
        # Not a daemon: a process that leaves does so between two checkpoints.
        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
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
        except Exception as error:  # noqa: BLE001 - raised again by whoever asked for it
            return CheckpointResult(error=error)
        self._good.add(directory.name)
        try:
            prune_checkpoints(directory.parent, keep=self._keep, good=self._good)
        except CheckpointError as error:
            return CheckpointResult(complaint=str(error))
        return CheckpointResult()
