"""metrics.jsonl: one flat JSON object per step, with keys such as `reward/mean`.

Promise: a row reaches the operating system before write() returns, and no row holds NaN. A reader
may open the file at any time and ignores a last line that is incomplete. Called from the
controller's event loop. docs/reference/metrics.md lists every key; tests check it.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError
from millrace.monitoring.run_dir import to_json, write_atomically


class MetricsLog:
    """Appends rows. `resume_from` is the step of the checkpoint that a resumed run starts from."""

    def __init__(self, path: Path, *, resume_from: int | None = None) -> None:
        kept: list[dict[str, Any]] = []
        if resume_from is not None and path.exists():
            # Steps after the checkpoint are trained again and get new rows.
            kept = [row for row in read_metrics(path) if row["step"] <= resume_from]
        write_atomically(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", buffering=1)  # line-buffered: one write per row

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Tables in the row become keys with slashes, and spaces in keys underscores; returns the
        row as it was written."""
        flat = {key.replace(" ", "_"): leaf for key, leaf in flatten(to_json(row)).items()}
        self._file.write(_line(flat))
        return flat

    def close(self) -> None:
        with contextlib.suppress(OSError):  # write() has already raised for this row
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows; none if the file does not exist yet."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    rows: list[dict[str, Any]] = []
    # The text after the last newline is empty, or a row that is still being written.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not JSON: {error.msg}.") from None
    if rows and "reward_mean" in rows[-1]:
        raise ConfigError(
            f"{path} was written by an older Millrace, whose metrics had other names (reward_mean"
            " is now reward/mean); use the version that wrote it, or start a new run."
        )
    return rows


def flatten(table: Mapping[str, Any], *, separator: str = "/") -> dict[str, Any]:
    """{"dropped": {"stale": 1}} as {"dropped/stale": 1}."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            below = flatten(value, separator=separator)
            flat |= {f"{name}{separator}{key}": leaf for key, leaf in below.items()}
        else:
            flat[name] = value
    return flat


def table(row: Mapping[str, Any], prefix: str, *, suffix: str = "") -> dict[str, Any]:
    """The values under `prefix`/, by the rest of their keys; the reverse of flatten(). With a
    `suffix`, only keys that end with it count: table(row, "rewards", suffix="/mean")."""
    start = f"{prefix}/"
    return {
        key.removeprefix(start).removesuffix(suffix): value
        for key, value in row.items()
        if key.startswith(start) and key.endswith(suffix)
    }


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
