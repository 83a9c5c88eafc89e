"""Watches a run from outside: when each step was done, and with which groups.

The checker reads metrics.jsonl and one episode of each group in rollouts/. The journal writes
neither, so the checker can contradict it. Called from one thread, from time to time.
"""

import json
import time
from dataclasses import dataclass

from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.run_dir import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """A step that the checker has seen completed."""

    at_s: float  # on the monotonic clock
    step: int
    is_new: bool  # False = repeated after a restart


class RunChecker:
    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._file: tuple[int, int] | None = None  # inode and size when last read
        self._num_rows = 0
        self.step = 0  # the last step that was ever completed
        self.steps_seen: list[StepSeen] = []
        self.began_s = self.ended_s = time.monotonic()  # of the run
        self.groups: dict[int, frozenset[int]] = {}  # by step
        self.contradictions: list[str] = []

    def look(self) -> None:
        """Read what the run has written since the last call."""
        try:
            status = self._run_dir.metrics.stat()
        except FileNotFoundError:
            return
        file = (status.st_ino, status.st_size)
        if file == self._file:
            return
        if self._file is not None and file[0] != self._file[0]:
            self._num_rows = 0  # a resumed run rewrites the rows that it keeps
        self._file = file
        self._read()

    def conclude(self) -> None:
        """The run is over."""
        self.ended_s = time.monotonic()
        self.look()
        if self.step:
            self._read_groups(self.step)

    def _read(self) -> None:
        rows = read_metrics(self._run_dir.metrics)
        now_s = time.monotonic()
        are_kept = self._num_rows == 0  # rows from before a restart, if there was one
        for row in rows[self._num_rows :]:
            step = row["step"]
            if step > self.step or not are_kept:
                self.steps_seen.append(StepSeen(at_s=now_s, step=step, is_new=step > self.step))
            self.step = max(self.step, step)
            # A step's episodes are written after its row and before the next row.
            if step > 1:
                self._read_groups(step - 1)
        self._num_rows = len(rows)

    def _read_groups(self, step: int) -> None:
        text = (self._run_dir.rollouts / f"step_{step}.jsonl").read_text()
        numbers = frozenset(json.loads(line)["group"] for line in text.splitlines())
        before = self.groups.setdefault(step, numbers)
        if before != numbers:
            self.contradictions.append(
                f"Step {step} trained on groups {sorted(before)}, and when it was repeated on"
                f" groups {sorted(numbers)}."
            )
