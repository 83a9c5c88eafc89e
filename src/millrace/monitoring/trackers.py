"""Experiment trackers: services and files that receive the same metrics as metrics.jsonl.

`[[tracker]] type` names a built-in tracker or a class of the user's, "package:Class". A tracker is
its own config: the other keys of its table are its arguments. Trackers are built and opened before
any worker starts, and called from the controller's event loop, so write() must not block.
"""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin


class Tracker(Protocol):
    def open(self, run_dir: Path, *, settings: Mapping[str, Any], resume_from: int | None) -> None:
        """The run begins, with these settings. `resume_from`: the step that a resumed run starts
        from; later steps are written again."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step by name, such as `reward/mean`; all values are finite."""

    def close(self) -> None:
        """The run is over; called once, also when the run failed."""


class TensorBoardTracker:
    """Writes RUN_DIR/tensorboard, in the event writer's own thread."""

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "A [[tracker]] of type 'tensorboard' needs a package that is not installed; run"
                " `pip install 'millrace[tensorboard]'`, or remove the tracker."
            )
        self._writer: Any = None

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


BUILT_IN = {"tensorboard": TensorBoardTracker}


def build_trackers(tables: Sequence[Mapping[str, Any]]) -> list[Tracker]:
    """One tracker for each `[[tracker]]` table."""
    return [
        build_plugin(table, builtins=BUILT_IN, default="tensorboard", section="tracker")
        for table in tables
    ]
