"""`millrace plan`: its table, JSON, timeline and TOML, and what the run made of the plan.

`run.plan.toml` is the file to run. `run.plan.json` beside it has the prediction, which `millrace
train run.plan.toml` compares with its measurements at the end.
"""

import argparse
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from millrace.compare.runs import PeakMemory
from millrace.config import anchored, load_config, parse_overrides, settings_table
from millrace.core.errors import ConfigError, printable
from millrace.monitoring.activity import ROLES, mean_by_role, total_shares
from millrace.monitoring.files.metrics import flatten, read_metrics
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.report.plots import draw_plot, draw_timeline
from millrace.monitoring.run_dir import RunDir
from millrace.plan import calibrate as calibration
from millrace.plan.controller_load import controller_busy
from millrace.plan.lengths import read_lengths
from millrace.plan.model_costs import GIB, ModelShape, gpu_named
from millrace.plan.planned_run import PlannedRun
from millrace.plan.search import search
from millrace.plan.simulation import Prediction
from millrace.presets import over_preset
from millrace.run.checks import check_settings
from millrace.training.losses.recipes import build_loss


def plan(args: argparse.Namespace) -> None:
    overrides = parse_overrides(args.settings)
    if args.gpus is not None and args.calibrate:
        raise ConfigError("--calibrate measures this machine; a plan for --gpus does not use it.")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise ConfigError(f"--price {args.price:g} is below 0 or not a number.")
    table = settings_table(args.config, overrides=overrides)
    if args.preset is not None:
        table = over_preset(table, args.preset, report=print)
    config = load_config(table)
    build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens)  # raises ConfigError
    shape = ModelShape.read(config.model.path)
    lengths = read_lengths(args.lengths, max_new_tokens=config.sampling.max_new_tokens)
    # Paths of the command line start from the present folder.
    given = anchored(table, folder=Path.cwd())
    settings: Mapping[str, Any] = {}
    if args.gpus is None:
        check_settings(config)
        file = calibration.calibration_file(args.calibration)
        if args.calibrate:
            calibration.calibrate(given, file=file)
        found = calibration.read_calibration(file)
        prediction = calibration.predict(found, config, shape, lengths)
        tokens = calibration.microbatch_tokens(config, lengths)
        memory = {found.device: int(found.run_mib(config, shape, tokens=tokens) * 2**20)}
        split = {"engines": config.engine.num_local, "ranks": config.trainer.num_ranks}
        notes = list[str]()
    else:
        gpu = {"gpu": gpu_named(args.gpu), "gpu_name": args.gpu.lower(), "num_gpus": args.gpus}
        run = PlannedRun(config=config, shape=shape, lengths=lengths, **gpu)
        limits = {"batches": args.groups_per_step, "max_staleness": args.max_staleness}
        chosen, prediction = search(run, **limits)
        memory = {"engine": chosen.engine_bytes, "trainer": chosen.trainer_bytes}
        settings, split = run.settings(chosen), asdict(chosen)
        notes = ["efficiencies are those that Millrace reached on an H200"]
        notes += (f"the plan has {text}" for text in _replaced(given, settings))
    hours = (args.gpus or 1) / prediction.samples_per_s / 3.6  # of one GPU
    if (cores := controller_busy(config, lengths, prediction)) > 1:
        notes.append(
            f"the controller would need {cores:.1f} cores for messages and journal, and has one, so"
            f" the run would be slower than this; with these lengths, one controller is enough for"
            f" {prediction.tokens_per_s / cores:,.0f} tokens/s"
        )
    result = {
        **{key: getattr(prediction, key) for key in FORMATS},
        "controller_busy": cores,
        "gpu_hours_per_1000_samples": hours,
        "cost_per_1000_samples": None if args.price is None else hours * args.price,
        "memory_bytes_per_device": memory,
        "split": split,
        "notes": [*notes, *([f"lengths are {lengths.source}"] if lengths.source else [])],
    }
    written = write_plan(args.config, _merged(given, settings), result, prediction)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(printable("\n".join(lines(result))))
    print(f"wrote {', '.join(path.name for path in written)} to {written[0].resolve().parent}")


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
            form = "{:.0%}" if key.endswith("_busy") else form
            text = f"{value / GIB:.1f} GiB" if key.endswith("bytes") else form.format(value)
            yield f"{key.removesuffix('_bytes').replace('_', ' '):<28}{text}"
    yield from (f"note: {note}" for note in result["notes"])


def write_plan(
    source: Path, settings: Mapping[str, Any], result: dict[str, Any], prediction: Prediction
) -> list[Path]:
    """Writes run.plan.toml with these settings, run.plan.json and run.plan.png beside run.toml."""
    toml, table, picture = (source.with_suffix(f".plan.{end}") for end in ("toml", "json", "png"))
    text = f"# Made by `millrace plan` from {source.name}; {table.name} has its prediction.\n\n"
    toml.write_text(text + tomli_w.dumps(settings))
    table.write_text(json.dumps({**result, "settings": settings}, indent=2) + "\n")
    draw_plot(picture, draw_timeline, prediction.spans)
    return [toml, table, picture]


def _merged(table: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(table) if isinstance(table, Mapping) else {}
    for key, value in settings.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def _replaced(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Keys of both with another value."""
    before = flatten(given, separator=".")
    for key, value in flatten(settings, separator=".").items():
        if before.get(key, value) != value:
            yield f"{key} = {value!r} instead of {before[key]!r}"


def compared(source: Path, run_dir: str, *, memory: PeakMemory | None = None) -> Iterator[str]:
    """Predicted against measured, after a run of a planned TOML."""
    file = source.with_suffix(".json")
    if not file.is_file():
        return
    plan = json.loads(file.read_text())
    is_changed = plan["settings"] != tomllib.loads(source.read_text())
    yield f"predicted by {file.name}{' (its settings have changed since)' * is_changed}:"
    pairs = {key: (plan[key], value) for key, value in measured(RunDir(run_dir)).items()}
    if memory is not None:
        is_on_cpu = "cpu" in plan["memory_bytes_per_device"]
        peak_mib = memory.peak_mib if is_on_cpu else memory.peak_gpu_mib
        if peak_mib is not None:  # of GPUs, only nvidia-smi knows it
            pairs["memory_gib"] = (_planned_bytes(plan) / GIB, peak_mib / 1024)
    for key, (expected, value) in pairs.items():
        form = FORMATS.get(key, "{:.1f}")
        error = f" ({expected / value - 1:+.0%})" if value else ""
        label = key.replace("_", " ")
        yield f"  {label:<16}{form.format(expected):>10}, measured {form.format(value)}{error}"


def _planned_bytes(plan: Mapping[str, Any]) -> float:
    """The planned memory of all processes of this host, or of all its GPUs."""
    by_device, settings = plan["memory_bytes_per_device"], plan["settings"]
    if "engine" not in by_device:
        return sum(by_device.values())
    engine, trainer = settings["engine"], settings["trainer"]
    num_ranks = trainer["ranks"] - trainer["remote"]
    return engine["count"] * engine["tp"] * by_device["engine"] + num_ranks * by_device["trainer"]


def measured(run_dir: RunDir, *, warm_up: int = 2) -> dict[str, float]:
    """What a run has measured of a prediction; rates and mean staleness after its first steps."""
    rows = read_metrics(run_dir.metrics)
    warm_up = warm_up if len(rows) > warm_up else 0
    counted, before = rows[warm_up:], rows[warm_up - 1] if warm_up else {}
    keys = ("throughput/time_s", "throughput/samples", "throughput/tokens")
    workers = mean_by_role(total_shares(read_trace(run_dir.trace)))
    busy = {f"{role}_busy": workers[role].busy for role in ROLES if role in workers}
    seconds, samples, tokens = (counted[-1][key] - before.get(key, 0) for key in keys)
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "staleness_mean": fmean(row["staleness/mean"] for row in counted),
        "staleness_max": max(row["staleness/max"] for row in rows),
        **busy,
    }
