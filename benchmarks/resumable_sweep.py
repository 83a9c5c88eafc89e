"""Resumable sweeps: each measurement is saved at once, and a later call continues."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def sweep(
    wanted: Iterable[Sequence[Any]],
    measure: Callable[..., Row],
    *,
    key: Sequence[str],
    file: Path | None,
    pool: Executor | None = None,
) -> list[Row]:
    """Rows of `measure(*values)` for all wanted values. A row has its values under the keys `key`.

    Rows that are in the file are not measured again. A `pool` measures several at once; if some
    fail, the rows of all others are saved first.
    """
    rows: list[Row] = json.loads(file.read_text()) if file and file.exists() else []
    known = {tuple(row[name] for name in key) for row in rows}
    left = [values for values in wanted if tuple(values) not in known]
    for row in _measured(left, measure, pool=pool):
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
        if file:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _measured(
    left: Sequence[Sequence[Any]], measure: Callable[..., Row], *, pool: Executor | None
) -> Iterator[Row]:
    if pool is None:
        yield from (measure(*values) for values in left)
        return
    errors: list[BaseException] = []
    for done in as_completed([pool.submit(measure, *values) for values in left]):
        if error := done.exception():
            errors.append(error)
        else:
            yield done.result()
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(left)} failed", errors)
