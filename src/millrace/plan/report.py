"""A plan for people and programs: its table, JSON, timeline and TOML; and what the run made of it.

`run.plan.toml` is the file to run. `run.plan.json` beside it has the prediction, which `millrace
train run.plan.toml` compares with its measurements at the end.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.plots import draw_plot, draw_timeline
from millrace.monitoring.run_dir import RunDir
from millrace.plan.model_costs import GIB
from millrace.plan.simulation import Prediction

FORMATS = {  # of the numbers of a prediction, for --json and run.plan.json, too
    "samples_per_s": "{:,.1f}",
    "tokens_per_s": "{:,.0f}",
    "step_s": "{:,.2f}",
    "staleness_mean": "{:.2f}",
    "staleness_max": "{:.0f}",
    "engine_busy": "{:.0%}",
    "trainer_busy": "{:.0%}",
    "tokens_wasted_share": "{:.1%}",
}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    split = {k: v for k, v in result["split"].items() if k not in ("engine_bytes", "trainer_bytes")}
    memory = {f"memory_of_{k}_bytes": v for k, v in result["memory_bytes_per_device"].items()}
    flat = {**result, **split, **memory}
    for key, value in flat.items():
        if isinstance(value, int | float):
            form = FORMATS.get(key, "{:,.3g}" if isinstance(value, float) else "{}")
            text = f"{value / GIB:.1f} GiB" if key.endswith("bytes") else form.format(value)
            yield f"{key.removesuffix('_bytes').replace('_', ' '):<28}{text}"
    yield from (f"note: {note}" for note in result["notes"])


def write_plan(
    source: Path, settings: Mapping[str, Any], result: dict[str, Any], prediction: Prediction
) -> list[Path]:
    """Writes run.plan.toml, run.plan.json and run.plan.png beside run.toml."""
    toml, table, picture = (source.with_suffix(f".plan.{end}") for end in ("toml", "json", "png"))
    merged = _merged(tomllib.loads(source.read_text()), settings)
    text = f"# Made by `millrace plan` from {source.name}; {table.name} has its prediction.\n\n"
    toml.write_text(text + tomli_w.dumps(merged))
    table.write_text(json.dumps({**result, "settings": merged}, indent=2) + "\n")
    draw_plot(picture, draw_timeline, prediction.spans)
    return [toml, table, picture]


def _merged(table: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table) if isinstance(table, Mapping) else {}
    for key, value in settings.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def compared(source: Path, run_dir: str) -> Iterator[str]:
    """Predicted against measured, after a run of a planned TOML."""
    file = source.with_suffix(".json")
    if not file.is_file():
        return
    plan = json.loads(file.read_text())
    is_changed = plan["settings"] != tomllib.loads(source.read_text())
    yield f"predicted by {file.name}{' (its settings have changed since)' * is_changed}:"
    for key, value in measured(RunDir(run_dir)).items():
        form = FORMATS[key]
        error = f" ({plan[key] / value - 1:+.0%})" if value else ""
        label = key.replace("_", " ")
        yield f"  {label:<16}{form.format(plan[key]):>10}, measured {form.format(value)}{error}"


def measured(run_dir: RunDir, *, warm_up: int = 2) -> dict[str, float]:
    """What a run has measured of a prediction, after its first steps."""
    rows = read_metrics(run_dir.metrics)
    warm_up = warm_up if len(rows) > warm_up else 0
    counted, before = rows[warm_up:], rows[warm_up - 1] if warm_up else {}
    keys = ("throughput/time_s", "throughput/samples", "throughput/tokens")
    seconds, samples, tokens = (counted[-1][key] - before.get(key, 0) for key in keys)
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "staleness_mean": fmean(row["staleness/mean"] for row in counted),
        "staleness_max": max(row["staleness/max"] for row in rows),
    }
