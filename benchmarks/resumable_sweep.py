"""Resumable sweeps: each measurement is saved at once, and a later call continues."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def sweep(
    wanted: Iterable[Sequence[Any]],
    measure: Callable[..., Row],
    *,
    key: Sequence[str],
    file: Path | None,
) -> list[Row]:
    """Rows of `measure(*values)` for all wanted values. A row has its values under the keys `key`.

    Rows that are in the file are not measured again.
    """
    rows: list[Row] = json.loads(file.read_text()) if file and file.exists() else []
    known = {tuple(row[name] for name in key) for row in rows}
    for values in wanted:
        if tuple(values) in known:
            continue
        rows.append(measure(*values))
        print(json.dumps(rows[-1]), flush=True)
        if file:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    return rows
