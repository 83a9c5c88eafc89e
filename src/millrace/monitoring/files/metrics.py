"""metrics.jsonl: one JSON object per step.

Promise: a row is handed to the system when write() returns, and none holds NaN. A reader may
come at any time; a line that a kill cut short is ignored. Called from the controller's event loop.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError
from millrace.monitoring.run_dir import write_atomically
from millrace.monitoring.strict_json import plain


class MetricsLog:
    """Appends rows. `resume_from` is the step of the checkpoint a resumed run goes on from."""

    def __init__(self, path: Path, *, resume_from: int | None = None) -> None:
        kept: list[dict[str, Any]] = []
        if resume_from is not None and path.exists():
            # Steps after the checkpoint are trained again; their first rows no longer count.
            kept = [row for row in read_metrics(path) if row["step"] <= resume_from]
        write_atomically(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", buffering=1)  # line-buffered: one write per row

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(_line(plain(row)))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row that could not be written, as was told then
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows; none if the file does not exist yet."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    rows: list[dict[str, Any]] = []
    # Behind the last newline stands nothing, or a row that is still being written.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not JSON: {error.msg}.") from None
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
