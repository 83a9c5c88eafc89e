"""A tracker in a process of its own, and the bounded queue before it.

Promise: no call but close() waits for the tracker, and close() at most PATIENCE_S. The run says
once that a tracker fails or hangs, and at the end how many points it did not get. A message and its
reply are one line of JSON each; a thread of the controller sends one message after the other.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.monitoring.trackers import Tracker, build_tracker

SHOWN = ("group", "prompt", "completion", "finish", "score", "advantage", "tokens")  # of episodes


class TrackerProcess:
    """The Tracker that the monitor uses, from the controller's event loop."""

    MAX_QUEUED = 1000  # messages
    PATIENCE_S = 30.0

    def __init__(self, table: Mapping[str, Any], *, warn: Callable[[str], None]) -> None:
        self._table, self._warn, self._name = dict(table), warn, str(table["type"])
        self._queue: queue.Queue[list[Any] | None] = queue.Queue(self.MAX_QUEUED)
        self._num_points = self._num_sent = 0
        self._sending_s: float | None = None  # since when a message has no reply; monotonic
        self._failure: str | None = None  # the first one
        self._has_warned = False

    def open(self, run_dir: Path, *, settings: Mapping[str, Any], resume_from: int | None) -> None:
        self._log = run_dir / "logs" / f"tracker-{Path(self._name).name}.log"
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with self._log.open("ab") as file:
            self._child = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-m", __name__]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which closes it
            )
        self._thread = threading.Thread(target=self._send_all, name="tracker", daemon=True)
        self._thread.start()
        self._put(["open", self._table, str(run_dir), dict(settings), resume_from])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._num_points += 1
        self._put(["write", step, dict(metrics)])

    def alert(self, sentence: str) -> None:
        self._put(["alert", sentence])

    def close(self) -> None:
        if self._put(["close"]) and self._put(None):
            self._thread.join(self.PATIENCE_S)
        self._child.kill()
        self._child.wait()
        if num_lost := self._num_points - self._num_sent:
            lost = f"{num_lost} of {self._num_points} points ({self._failure or 'no reply'})"
            self._warn(f"Tracker {self._name!r} did not get {lost}; see {self._log}.")

    def _put(self, message: list[Any] | None) -> bool:
        """False if the queue is full: the message is dropped."""
        waited_s = 0.0 if self._sending_s is None else time.monotonic() - self._sending_s
        failure = self._failure or ("no reply" if waited_s > self.PATIENCE_S else None)
        if failure and not self._has_warned:
            self._has_warned = True
            self._warn(f"Tracker {self._name!r} fails, and the run continues: {failure}.")
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return False
        return True

    def _send_all(self) -> None:
        """Runs in the thread."""
        messages, replies = self._child.stdin, self._child.stdout
        assert messages is not None
        assert replies is not None
        while (message := self._queue.get()) is not None:
            self._sending_s = time.monotonic()
            try:
                messages.write(json.dumps(message).encode() + b"\n")
                messages.flush()
                failure = json.loads(replies.readline())
            except (BrokenPipeError, json.JSONDecodeError):
                failure = "its process has ended"
            self._sending_s = None
            self._failure = self._failure or failure
            self._num_sent += message[0] == "write" and failure is None


class _TrackerHost:
    """The other end; its methods are the messages."""

    def open(self, table: dict[str, Any], run_dir: str, settings: Any, resume_from: Any) -> None:
        self._run_dir, self._step = Path(run_dir), 0
        tracker = build_tracker(table)
        tracker.open(self._run_dir, settings=settings, resume_from=resume_from)
        self._tracker: Tracker = tracker

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.write(step, metrics)
        self._write_episodes()  # of the step before: its file was complete before this message
        self._step = step

    def alert(self, sentence: str) -> None:
        getattr(self._tracker, "alert", lambda sentence: None)(sentence)

    def close(self) -> None:
        self._write_episodes()
        self._tracker.close()

    def _write_episodes(self) -> None:
        path = self._run_dir / "rollouts" / f"step_{self._step}.jsonl"
        write = getattr(self._tracker, "write_episodes", None)
        if write is not None and path.is_file():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            write(self._step, [{name: row.get(name) for name in SHOWN} for row in rows])


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trackers print goes to the log
    host = _TrackerHost()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        failure = None
        try:
            getattr(host, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the run reports it and continues
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps(failure), file=replies, flush=True)


if __name__ == "__main__":
    main()
