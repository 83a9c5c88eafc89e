"""Numbers and curves as short text, for the progress views and the summary."""

from collections.abc import Mapping, Sequence

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """0:07, 12:30, 3:05:00."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def rate(per_second: float) -> str:
    """Three digits, whatever the size: 0.42, 8.13, 51.2, 812, 10.2k, 1.30M."""
    size, unit = (1e6, "M") if per_second >= 1e6 else (1e3, "k") if per_second >= 1e3 else (1, "")
    value = per_second / size
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}{unit}"


def counts(reasons: Mapping[str, int]) -> str:
    """ "4 (too stale 3, timed out 1)", most frequent first; "0" if there are none."""
    total = sum(reasons.values())
    if not total:
        return "0"
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return f"{total} ({', '.join(f'{reason} {n}' for reason, n in ordered if n)})"


def curve(values: Sequence[float], *, columns: int, rows: int) -> tuple[list[str], float, float]:
    """An area chart of means: its lines, top first, and the values at its bottom and top."""
    means = _resample(values, columns)
    low, high = min(means), max(means)
    levels = rows * (len(BLOCKS) - 1)
    # The lowest point is one eighth of a line high, to differ from "no step yet".
    heights = [1 + round((mean - low) / (high - low or 1.0) * (levels - 1)) for mean in means]
    lines = [
        "".join(BLOCKS[min(max(height - row * 8, 0), 8)] for height in heights)
        for row in reversed(range(rows))
    ]
    return lines, low, high


def _resample(values: Sequence[float], columns: int) -> list[float]:
    """Returns at most `columns` values, each the mean of equally many steps."""
    if len(values) <= columns:
        return list(values)
    edges = np.arange(columns + 1) * len(values) // columns
    return (np.add.reduceat(values, edges[:-1]) / np.diff(edges)).tolist()
