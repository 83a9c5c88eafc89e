"""Metrics of a run as columns: little memory for many steps, and curves of any length.

Promise: a curve has at most `points` values, each the mean of equally many steps; a step without a
value does not count. Used by one thread.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RECENT_ROWS = 20  # the newest steps, where a sentence says what the run does now


class MetricColumns:
    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self.num_rows = 0
        self.last: dict[str, Any] = {}  # the newest row

    def append(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            column = self._columns.setdefault(key, array("d"))
            column.extend([math.nan] * (self.num_rows - len(column)))
            column.append(value if isinstance(value, int | float) else math.nan)
        self.num_rows += 1
        self.last = dict(row)

    @property
    def keys(self) -> list[str]:
        return sorted(self._columns)

    def column(self, key: str) -> np.ndarray:
        """[rows] float64, a copy; NaN where a row has no value."""
        values = np.full(self.num_rows, np.nan)
        if key in self._columns:
            found = np.frombuffer(self._columns[key])
            values[: len(found)] = found
        return values

    def recent(self, *prefixes: str) -> dict[str, float]:
        """Means over the newest rows, of keys that start with one of these. A row without a key
        counts as 0: it lists only the waits that occurred."""
        found = [key for key in self.keys if key.startswith(prefixes)]
        newest = {key: self.column(key)[-RECENT_ROWS:] for key in found}
        return {k: float(np.nan_to_num(v).mean()) for k, v in newest.items() if len(v)}

    def curves(
        self, keys: Sequence[str], *, points: int, start: int = 0, end: int | None = None
    ) -> dict[str, list[float | None]]:
        """Of the steps from `start` up to and with `end`; None where no step has a value."""
        steps = self.column("step")
        chosen = np.flatnonzero((steps >= start) & (steps <= (math.inf if end is None else end)))
        num_means = min(points, len(chosen))
        edges = np.arange(num_means) * len(chosen) // max(num_means, 1)
        return {key: _means(self.column(key)[chosen], edges) for key in keys}


def _means(values: np.ndarray, edges: np.ndarray) -> list[float | None]:
    if not len(edges):
        return []
    counts = np.add.reduceat((~np.isnan(values)).astype(float), edges)
    sums = np.add.reduceat(np.nan_to_num(values), edges)
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [float(f"{total / count:.7g}") if count else None for total, count in pairs]
