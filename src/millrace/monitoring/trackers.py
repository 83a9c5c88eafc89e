"""Experiment trackers: services and files that receive the same metrics as metrics.jsonl.

`[[tracker]] type` names a built-in tracker or a class of the user's, "package:Class". A tracker is
its own config: the other keys of its table are its arguments. It is built before any worker starts,
so that errors are found early, and again in a process of its own, where its methods may block. The
built-in ones find the address and the key of their service as their packages do.
"""

import importlib
import importlib.util
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin

IDS = "trackers.json"  # of a run directory: ids of the run by tracker, for a resumed run
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
        new = {"project": self._project, "name": self._name, "config": settings, "dir": run_dir}
        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = self._api.init(id=run_id, resume="allow", **new)
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
    """The tracker of one `[[tracker]]` table."""
    return build_plugin(table, builtins=BUILT_IN, default="tensorboard", section="tracker")


def _require(package: str) -> None:
    """Raise unless the package of a tracker is installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"A [[tracker]] of type {package!r} needs a package that is not installed; run"
            f" `pip install 'millrace[{package}]'`, or remove the tracker."
        )
