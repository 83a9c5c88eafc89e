"""Experiment trackers: services and files that receive the same metrics as metrics.jsonl.

`[[tracker]] type` names a built-in tracker or a class of the user's, "package:Class". A tracker is
its own config: the other keys of its table are its arguments. It is built before any worker starts,
so that errors are found early, and again in a process of its own, where its methods may block. The
built-in ones find the address and the key of their service as their packages do.
"""

import importlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin

IDS = "trackers.json"  # of a run directory: ids of the run by tracker, for a resumed run
SHOWN = ("group", "prompt", "completion", "finish", "score", "advantage", "tokens")  # of episodes
Rows = Sequence[Mapping[str, Any]]


class Tracker(Protocol):
    """May also have write_episodes(step, rows), for some episodes of a step, and alert(sentence),
    for warnings of the run."""

    def open(self, run_dir: Path, *, settings: Mapping[str, Any], resume_from: int | None) -> None:
        """The run begins, with these settings. `resume_from`: the step that a resumed run starts
        from; later steps are written again."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step by name, such as `reward/mean`; all values are finite."""

    def close(self) -> None:
        """The run is over; called once, also when the run failed."""


class TensorBoardTracker:
    """Writes the metrics to RUN_DIR/tensorboard."""

    def __init__(self) -> None:
        _require("tensorboard")

    def open(self, run_dir: Path, *, settings: Mapping[str, Any], resume_from: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # These classes are generated at import, so type checkers do not know them.
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)
        if resume_from is not None:
            # TensorBoard then forgets the points of steps that are trained again.
            session: Any = vars(event_pb2)["SessionLog"]
            self._add(step=resume_from + 1, session_log=session(status=session.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=v) for tag, v in metrics.items()]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **fields))


class _Service:
    package: str

    def __init__(self, *, project: str = "millrace", name: str | None = None) -> None:
        """`name` of the run; by default that of its directory."""
        _require(self.package)
        self._project, self._name = project, name
        self._run: Any = None

    def open(self, run_dir: Path, *, settings: Mapping[str, Any], resume_from: int | None) -> None:
        self._api: Any = importlib.import_module(self.package)
        self._name = self._name or run_dir.name
        path = run_dir / IDS
        ids = json.loads(path.read_text()) if path.is_file() else {}
        known = None if resume_from is None else ids.get(self.package)
        ids[self.package] = self._begin(known, run_dir, dict(settings))
        path.write_text(json.dumps(ids))

    def _begin(self, run_id: str | None, run_dir: Path, settings: dict[str, Any]) -> str:
        """Begin a run, or resume the one with this id; returns its id."""
        raise NotImplementedError

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**metrics, "step": step})

    def write_episodes(self, step: int, rows: Rows) -> None:
        cells = [[json.dumps(value) for value in row.values()] for row in rows]
        self.write(step, {"episodes": self._api.Table(columns=list(rows[0]), data=cells)})

    def alert(self, sentence: str) -> None:
        self._run.alert("millrace", sentence)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_Service):
    package = "wandb"

    def _begin(self, run_id: str | None, run_dir: Path, settings: dict[str, Any]) -> str:
        run_id = run_id or uuid.uuid4().hex[:12]
        new = {"name": self._name, "config": settings, "dir": run_dir}
        self._run = self._api.init(project=self._project, id=run_id, resume="allow", **new)
        # Its own counter never goes back, as the steps of a resumed run do.
        self._run.define_metric("*", step_metric="step")
        return run_id


class TrackioTracker(_Service):
    package = "trackio"

    def _begin(self, run_id: str | None, run_dir: Path, settings: dict[str, Any]) -> str:
        name = run_id or f"{self._name}-{uuid.uuid4().hex[:6]}"  # its runs have no other id
        new = {"config": settings, "embed": False}
        self._run = self._api.init(self._project, name=name, resume="allow", **new)
        return name

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)


class MlflowTracker(_Service):
    package = "mlflow"

    def _begin(self, run_id: str | None, run_dir: Path, settings: dict[str, Any]) -> str:
        self._api.set_experiment(self._project)
        run = self._api.start_run(run_id=run_id, run_name=self._name)
        self._api.log_dict(settings, "config.json")
        return run.info.run_id

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        allowed = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        self._api.log_metrics(allowed, step=step)

    def write_episodes(self, step: int, rows: Rows) -> None:
        table = {name: [json.dumps(row[name]) for row in rows] for name in rows[0]}
        self._api.log_table(table, f"episodes/step_{step}.json")

    def alert(self, sentence: str) -> None:
        self._api.set_tag("alert", sentence)

    def close(self) -> None:
        self._api.end_run()


BUILT_IN = {
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def build_tracker(table: Mapping[str, Any]) -> Tracker:
    return build_plugin(table, builtins=BUILT_IN, default="tensorboard", section="tracker")


def _require(package: str) -> None:
    """Raise unless the package of a tracker is installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"A [[tracker]] of type {package!r} needs a package that is not installed; run"
            f" `pip install 'millrace[{package}]'`, or remove the tracker."
        )


class TrackerProcess:
    """A tracker in a process of its own, and the bounded queue before it; the Tracker that the
    monitor uses, from the controller's event loop.

    Promise: no call but close() waits for the tracker, and close() at most PATIENCE_S. The run says
    once that a tracker fails or hangs, and at the end how many points it did not get. A message and
    its reply are one line of JSON each; a thread of the controller sends one after the other.
    """

    MAX_QUEUED = 1000  # messages
    PATIENCE_S = 30.0

    def __init__(self, table: Mapping[str, Any], *, warn: Callable[[str], None]) -> None:
        self._table, self._warn, self._name = dict(table), warn, str(table["type"])
        self._queue: queue.Queue[list[Any]] = queue.Queue()
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
        self._put(["close"])
        self._thread.join(self.PATIENCE_S)
        self._child.kill()
        self._child.wait()
        if num_lost := self._num_points - self._num_sent:
            lost = f"{num_lost} of {self._num_points} points ({self._failure or 'no reply'})"
            self._warn(f"Tracker {self._name!r} did not get {lost}; see {self._log}.")

    def _put(self, message: list[Any]) -> None:
        """If the queue is full, the message is dropped, unless it is the last one."""
        waited_s = 0.0 if self._sending_s is None else time.monotonic() - self._sending_s
        failure = self._failure or ("no reply" if waited_s > self.PATIENCE_S else None)
        if failure and not self._has_warned:
            self._has_warned = True
            self._warn(f"Tracker {self._name!r} fails, and the run continues: {failure}.")
        if self._queue.qsize() < self.MAX_QUEUED or message == ["close"]:  # one thread puts
            self._queue.put_nowait(message)

    def _send_all(self) -> None:
        """Runs in the thread."""
        messages, replies = self._child.stdin, self._child.stdout
        assert messages is not None
        assert replies is not None
        message: list[Any] = []
        while message != ["close"]:
            message = self._queue.get()
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
