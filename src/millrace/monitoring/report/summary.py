"""The summary of a run directory, whether its run finished, is running, or was killed.

It is one block of text, which has what a bug report needs.

Promise: reads only. A missing or incomplete file costs only the rows that it would have filled.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from millrace.config import ModelConfig, RunConfig
from millrace.core.errors import ConfigError
from millrace.monitoring import activity
from millrace.monitoring.files.metrics import flatten, read_metrics, run_rates, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.text import counts, curve, duration, rate

MAX_WARNINGS = 10  # the newest are shown

Rows = Iterator[tuple[str, str]]  # label and text; a row without a label continues the one above


def summary_text(path: str | Path) -> str:
    """Plain text without line wrapping, so that paths and settings can be copied."""
    rows = list(summary_rows(path))
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in rows)


def summary_rows(path: str | Path) -> Rows:
    """Means are over all steps so far."""
    run_dir = RunDir(path)
    if not run_dir.exists and not run_dir.metrics.is_file():
        raise ConfigError(
            f"{path} is not a run directory: it holds neither config.toml with run.lock"
            " nor metrics.jsonl; pass the folder that run_dir named."
        )
    metrics = read_metrics(run_dir.metrics)
    last = metrics[-1] if metrics else {}
    final = json.loads(run_dir.summary.read_text()) if run_dir.is_finished else {}
    stopped = "finished" if run_dir.is_finished else "stopped"
    yield "run", f"{run_dir.path} ({'running' if run_dir.is_running else stopped})"
    seconds = final.get("seconds", last.get("time_s"))
    time = "" if seconds is None else f" in {duration(seconds)}"
    yield "steps", f"{last.get('step', 0)}{time}"
    yield from _results(metrics, final)
    if rates := run_rates(last):
        samples, tokens = rate(rates["samples_per_s"]), rate(rates["tokens_per_s"])
        yield "throughput", f"{samples} samples/s, {tokens} tokens/s"
    if staleness := _values(metrics, "staleness/mean"):
        most = max(_values(metrics, "staleness/max"))
        yield "staleness", f"mean {fmean(staleness):.2f}, max {most}"
    if spreads := _values(metrics, "version_spread/rollout_mean"):
        of_group = fmean(_values(metrics, "version_spread/group_mean"))
        yield "version spread", f"{fmean(spreads):.2f} per rollout, {of_group:.2f} per group"
    yield from _workers(run_dir, last)
    yield from _losses(metrics)
    yield from _circumstances(run_dir)
    for number, file in enumerate(_files(run_dir)):
        yield "" if number else "files", str(file)


def accuracy_by_step(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Held-out accuracy by the step after which it was measured."""
    return {row["eval/step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def _results(metrics: list[dict[str, Any]], final: Mapping[str, Any]) -> Rows:
    rewards = _values(metrics, "reward/mean")
    if values := rewards or _values(metrics, "loss"):  # the latter of supervised fine-tuning
        (line,), _, _ = curve(values, columns=40, rows=1)
        yield "reward" if rewards else "loss", f"{values[0]:.3f} → {values[-1]:.3f}  {line}"
    if held_out := _values(metrics, "eval/loss"):
        yield "held-out loss", f"{held_out[0]:.3f} → {held_out[-1]:.3f}"
    before, after = final.get("accuracy_before"), final.get("accuracy_after")
    if before is not None and after is not None:
        yield "held-out accuracy", f"{before:.3f} → {after:.3f}"
    elif accuracies := accuracy_by_step(metrics):
        step = max(accuracies)
        yield "held-out accuracy", f"{accuracies[step]:.3f} at step {step}"


def _workers(run_dir: RunDir, last: Mapping[str, Any]) -> Rows:
    workers = activity.total_shares(read_trace(run_dir.trace))
    for worker, shares in activity.without_idle(workers).items():
        yield worker, "never started serving" if shares is None else _worker(shares)
    if (waited := activity.waited_for_scores(workers)) >= activity.MIN_SHARE:
        yield "scoring", f"limited the run: the trainer waited for scores {waited:.0%} of its time"
    scorers: dict[str, dict[str, float]] = {}
    for key, value in table(last, "scorer").items():
        name, _, metric = key.rpartition("/")
        scorers.setdefault(name, {})[metric] = value
    for name, load in scorers.items():
        yield f"scorer {name}", activity.total_text(load)


def _worker(shares: activity.Shares) -> str:
    doing, waiting = _by_share(shares.doing), _by_share(shares.waiting)
    text = f"{shares.busy:.0%} busy ({doing})" if doing else "0% busy"
    return f"{text}, waits: {waiting}" if waiting else text


def _by_share(shares: Mapping[str, float]) -> str:
    """Largest first, without shares that round to 0 %."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)


def _losses(metrics: list[dict[str, Any]]) -> Rows:
    """Groups and tokens that were not trained on, and failures that the run survived."""
    last = metrics[-1] if metrics else {}
    for status in ("dropped", "cancelled", "failed"):
        if any((found := table(last, status)).values()):
            yield f"groups {status}", counts(found)
    if skipped := sum(updates > 0 for updates in _values(metrics, "skipped/updates")):
        yield "steps skipped", f"{skipped}, because the loss or gradient was not finite"
    if restarts := table(last, "restarts"):
        sequences = last.get("sequences/resumed")
        resumed = f"; {sequences} sequences resumed on another engine" if sequences else ""
        yield "workers restarted", counts(restarts) + resumed
    if tokens := last.get("tokens/resumed"):
        yield "resumed", f"{tokens} tokens of groups in flight were reused"
    if replayed := sum(_values(metrics, "groups/replayed")):
        yield "groups replayed", str(replayed)
    if any((wasted := table(last, "tokens/wasted")).values()):
        yield "tokens wasted", counts(wasted)
    if staleness := table(last, "tokens/wasted_staleness"):
        means = (f"{reason} {mean:.2f}" for reason, mean in staleness.items())
        yield "", f"mean staleness: {', '.join(means)}"
    if any(table(last, "cancelled").values()):
        yield "", f"cancelling saved about {last['tokens/saved']} tokens"


def _circumstances(run_dir: RunDir) -> Rows:
    """What a reader of a bug report asks for: versions, machine, settings, warnings."""
    if run_dir.config.is_file():
        text = run_dir.config.read_text()
        if text.startswith("# "):
            yield "made with", text.partition("\n")[0].removeprefix("# ")
        changes = changed_settings(tomllib.loads(text))
        for number, (key, value) in enumerate(changes.items()):
            yield "" if number else "settings", f"{key} = {value!r:.200}"
    if run_dir.warnings.is_file():
        lines = run_dir.warnings.read_text().splitlines()
        yield "warnings", f"{len(lines)}, in {run_dir.warnings}"
        yield from (("", line) for line in lines[-MAX_WARNINGS:])


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from their defaults, by dotted key."""
    config = RunConfig(model=ModelConfig(path=""))
    defaults = flatten(config.model_dump(mode="json"), separator=".")
    found = flatten(settings, separator=".")
    return {key: value for key, value in found.items() if value != defaults.get(key)}


def _values(metrics: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in metrics if row.get(key) is not None]


def _files(run_dir: RunDir) -> Iterator[Path]:
    files = (run_dir.config, run_dir.metrics, run_dir.trace, run_dir.summary)
    yield from (file for file in files if file.is_file())
    folders = (run_dir.rollouts, run_dir.skipped, run_dir.logs, run_dir.tensorboard)
    yield from (folder for folder in folders if folder.is_dir() and any(folder.iterdir()))
    yield from run_dir.checkpoint_paths
