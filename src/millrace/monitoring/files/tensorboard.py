"""The same metrics as TensorBoard files. The only file that imports tensorboard.

It comes with the extra millrace[tensorboard]. Called from the controller's event loop; a thread of
the event writer does the writing.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError
from millrace.monitoring.strict_json import plain


class TensorBoardLog:
    """Every number of a row is a scalar; tables become tags such as score_parts/correct."""

    def __init__(self, directory: Path, *, resume_from: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ConfigError(
                "Setting 'watch.tensorboard' = true needs a package that is not installed;"
                " run `pip install 'millrace[tensorboard]'`, or set it to false."
            ) from None
        # Generated at import, so type checkers cannot know these classes.
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if resume_from is not None:
            # TensorBoard then forgets the points of steps that are trained again.
            session: Any = vars(event_pb2)["SessionLog"]
            self._add(step=resume_from + 1, session_log=session(status=session.START))

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=number)
            for tag, number in _scalars(plain(row))
        ]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **fields))


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)
