"""Resumable sweeps: each measurement is saved at once, and a later call continues."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def sweep(
    wanted: Iterable[Sequence[Any]],
    measure: Callable[..., Row],
    *,
    key: Sequence[str],
    file: Path | None,
    jobs: int = 1,
) -> list[Row]:
    """Rows of `measure(*values)` for all wanted values. A row has its values under the keys `key`.

    Rows that are in the file are not measured again. With several `jobs`, as many processes measure
    at once, and `measure` is a function that they can import.
    """
    rows: list[Row] = json.loads(file.read_text()) if file and file.exists() else []
    known = {tuple(row[name] for name in key) for row in rows}
    left = [values for values in wanted if tuple(values) not in known]
    for row in _measured(left, measure, jobs=jobs):
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
        if file:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _measured(
    left: Sequence[Sequence[Any]], measure: Callable[..., Row], *, jobs: int
) -> Iterator[Row]:
    if jobs == 1:
        yield from (measure(*values) for values in left)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measure, *values) for values in left]):
            yield done.result()
