"""The table and the page of a comparison."""

import html
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_NOTHING = "-"
_COLOURS = ("#2b6cb0", "#63b3ed", "#f6ad55", "#ed8936", "#c05621", "#9b2c2c", "#553c9a", "#2d3748")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em } table { border-collapse: collapse }
td { padding: .3em .7em; text-align: left; border-bottom: 1px solid #ddd }
.bar { display: flex; width: 30em } .bar span { color: white; overflow: hidden }
"""


# Title ({} is the first design), key of a row, and how a number is written.
_COLUMNS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("samples/s", "samples_per_s", "{:.2f}".format),
    ("times {}", "times", "{:.2f}".format),
    ("training s", "seconds", "{:.0f}".format),
    ("s to target", "time_to_target_s", "{:.0f}".format),
    ("accuracy", "accuracy", "{:.3f}".format),
    ("last reward", "reward", "{:.3f}".format),
    ("tokens wasted", "wasted_share", "{:.1%}".format),
    ("engine idle", "engine_idle", "{:.1%}".format),
    ("trainer idle", "trainer_idle", "{:.1%}".format),
    ("engine time for weights", "sync_share", "{:.1%}".format),
    ("peak MiB", "peak_mib", "{:.0f}".format),
    ("peak MiB on GPUs", "peak_gpu_mib", "{:.0f}".format),
    ("mean staleness", "mean_staleness", "{:.1f}".format),
)


def markdown(rows: Rows, *, notes: Sequence[str]) -> str:
    headers, *lines = _lines(rows)
    lines = [headers, ["---"] * len(headers), *lines]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([table, "", *(f"- {sentence}" for sentence in [*_errors(rows), *notes]), ""])


def page(rows: Rows, *, command: str, notes: Sequence[str]) -> str:
    """One HTML file without scripts or anything from elsewhere."""
    cells = ([f"<td>{html.escape(cell)}</td>" for cell in line] for line in _lines(rows))
    lines = "".join(f"<tr>{''.join(line)}</tr>" for line in cells)
    bars = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_bar(_mean_table(of_design, 'staleness'))}</td></tr>"
        for name, of_design in _by_design(rows).items()
    )
    texts = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in [*_errors(rows), *notes])
    return (
        f'<!doctype html><meta charset="utf-8"><title>Comparison</title><style>{_STYLE}</style>'
        f"<h1>Comparison</h1><p><code>{html.escape(command)}</code></p><table>{lines}</table>"
        f"<h2>Trained tokens by staleness</h2><table>{bars}</table>{texts}"
    )


def _by_design(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["design"], []).append(row)
    return found


def _lines(rows: Rows) -> list[list[str]]:
    """Titles, then the cells of each design: means over its seeds, and the range if there are
    several. Columns that no run has measured are left out."""
    first = rows[0]["design"]
    speeds = [(row["design"], row.get("samples_per_s")) for row in rows]
    if base := [speed for design, speed in speeds if design == first and speed]:
        times = [speed and speed / fmean(base) for _, speed in speeds]
        rows = [{**row, "times": share} for row, share in zip(rows, times, strict=True)]
    columns = [column for column in _COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    tables = ("trained tokens by staleness", "wasted tokens by reason")
    lines = [["design", *(title.format(first) for title, _, _ in columns), *tables]]
    for name, of_design in _by_design(rows).items():
        cells = [_cell(of_design, key, write) for _, key, write in columns]
        stale, wasted = (_mean_table(of_design, key) for key in ("staleness", "wasted"))
        shares = ", ".join(f"{age}: {share:.0%}" for age, share in stale.items() if share >= 0.005)
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in wasted.items())
        lines.append([name, *cells, shares or _NOTHING, reasons or _NOTHING])
    return lines


def _cell(rows: Rows, key: str, write: Callable[[float], str]) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    text = write(fmean(values)) if values else _NOTHING
    if len(values) > 1:
        text += f" ({write(min(values))} to {write(max(values))})"
    return f"{text}, {len(values)} of {len(rows)} runs" if 0 < len(values) < len(rows) else text


def _mean_table(rows: Rows, key: str) -> dict[str, float]:
    """The mean of a table over the runs that finished."""
    tables = [row[key] for row in rows if key in row]
    names = sorted({name for table in tables for name in table}, key=lambda n: (len(n), n))
    return {name: fmean(table.get(name, 0.0) for table in tables) for name in names}


def _errors(rows: Rows) -> list[str]:
    failed = [row for row in rows if row["status"] == "failed"]
    return [f"{row['design']} failed with seed {row['seed']}: {row['error']}" for row in failed]


def _bar(shares: Mapping[str, float]) -> str:
    parts = (
        f'<span style="width:{share:.2%};background:{_COLOURS[int(age) % len(_COLOURS)]}"'
        f' title="{share:.2%} of the tokens">{age}</span>'
        for age, share in shares.items()
    )
    return f'<div class="bar">{"".join(parts)}</div>'
