"""The summary of a run directory, whether its run finished, is running, or was killed.

Promise: reads only. A missing or incomplete file costs only the lines that it would have filled.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from millrace.core.errors import ConfigError
from millrace.monitoring.activity import Activity, Shares
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.scorer_load import MIN_SHARE, total_text
from millrace.monitoring.terminal.text import counts, curve, duration, rate
from millrace.monitoring.throughput import run_rates


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Means are over all steps so far; None where the run has no value yet."""

    run_dir: Path
    state: Literal["running", "finished", "stopped"]
    steps: int
    seconds: float | None
    rewards: tuple[float, ...]  # mean of each step
    accuracy_before: float | None
    accuracy_after: float | None
    accuracies: dict[int, float]  # by step, of the evaluations during training
    samples_per_s: float | None
    tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    rollout_spread: float | None  # versions between the oldest and the newest token
    group_spread: float | None
    workers: dict[str, Shares | None]  # None = never finished its start-up
    dropped: dict[str, int]  # groups, by reason
    cancelled: dict[str, int]  # attempts that became too stale, by what they were doing
    replayed: int  # groups trained on again
    failed: dict[str, int]
    steps_skipped: int  # steps with an update that was not finite
    scorers: dict[str, dict[str, float]]  # from the last row
    last_row: dict[str, Any]  # of the metrics
    files: tuple[Path, ...]  # what the run directory holds


def summarise(path: str | Path) -> RunSummary:
    run_dir = RunDir(path)
    if not run_dir.exists and not run_dir.metrics.is_file():
        raise ConfigError(
            f"{path} is not a run directory: it holds neither config.toml with run.lock"
            " nor metrics.jsonl; pass the folder that run_dir named."
        )
    rows = read_metrics(run_dir.metrics)
    last = rows[-1] if rows else {}
    final = json.loads(run_dir.summary.read_text()) if run_dir.is_finished else {}
    activity = Activity()
    activity.add(read_trace(run_dir.trace))
    stopped = "finished" if run_dir.is_finished else "stopped"
    rates = run_rates(last)
    return RunSummary(
        run_dir=run_dir.path,
        state="running" if run_dir.is_running else stopped,
        steps=last.get("step", 0),
        seconds=final.get("seconds", last.get("time_s")),
        rewards=tuple(row["reward/mean"] for row in rows if row.get("reward/mean") is not None),
        accuracy_before=final.get("accuracy_before"),
        accuracy_after=final.get("accuracy_after"),
        accuracies=accuracy_by_step(rows),
        samples_per_s=rates.get("samples_per_s"),
        tokens_per_s=rates.get("tokens_per_s"),
        staleness_mean=_mean(rows, "staleness/mean"),
        staleness_max=max((r["staleness/max"] for r in rows if "staleness/max" in r), default=None),
        rollout_spread=_mean(rows, "version_spread/rollout_mean"),
        group_spread=_mean(rows, "version_spread/group_mean"),
        workers=activity.total(),
        dropped=table(last, "dropped"),
        cancelled=table(last, "cancelled"),
        replayed=sum(row.get("groups/replayed", 0) for row in rows),
        failed=table(last, "failed"),
        steps_skipped=sum(row.get("skipped/updates", 0) > 0 for row in rows),
        scorers=_scorers(last),
        last_row=last,
        files=tuple(_files(run_dir)),
    )


def accuracy_by_step(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Held-out accuracy by the step after which it was measured."""
    return {row["eval/step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def summary_table(summary: RunSummary) -> Table:
    """For the terminal: one row per fact."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(summary):
        grid.add_row(label, text)
    return grid


def _rows(run: RunSummary) -> Iterator[tuple[str, str]]:
    yield "run", f"{run.run_dir} ({run.state})"
    time = "" if run.seconds is None else f" in {duration(run.seconds)}"
    yield "steps", f"{run.steps}{time}"
    yield from _results(run)
    if run.samples_per_s is not None and run.tokens_per_s is not None:
        samples, tokens = rate(run.samples_per_s), rate(run.tokens_per_s)
        yield "throughput", f"{samples} samples/s, {tokens} tokens/s"
    if run.staleness_mean is not None:
        yield "staleness", f"mean {run.staleness_mean:.2f}, max {run.staleness_max}"
    if run.rollout_spread is not None and run.group_spread is not None:
        of_rollout, of_group = f"{run.rollout_spread:.2f}", f"{run.group_spread:.2f}"
        yield "version spread", f"{of_rollout} per rollout, {of_group} per group"
    for worker, shares in run.workers.items():
        yield worker, "never started serving" if shares is None else _worker(shares)
    trainer = run.workers.get("trainer")
    waited = 0.0 if trainer is None else trainer.waiting.get("scores", 0.0)
    if waited >= MIN_SHARE:
        yield "scoring", f"limited the run: the trainer waited for scores {waited:.0%} of its time"
    for name, load in run.scorers.items():
        yield f"scorer {name}", total_text(load)
    yield from _losses(run)
    for number, file in enumerate(run.files):
        yield "" if number else "files", os.fspath(file)


def _results(run: RunSummary) -> Iterator[tuple[str, str]]:
    if run.rewards:
        line = curve(run.rewards, columns=40, rows=1).lines[0]
        yield "reward", f"{run.rewards[0]:.3f} → {run.rewards[-1]:.3f}  {line}"
    if run.accuracy_before is not None and run.accuracy_after is not None:
        yield "held-out accuracy", f"{run.accuracy_before:.3f} → {run.accuracy_after:.3f}"
    elif run.accuracies:
        step = max(run.accuracies)
        yield "held-out accuracy", f"{run.accuracies[step]:.3f} at step {step}"


def _losses(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Groups and tokens that were not trained on, and failures that the run survived."""
    yield "groups dropped", counts(run.dropped)
    yield "groups cancelled", counts(run.cancelled)
    yield "groups failed", counts(run.failed)
    if run.steps_skipped:
        yield "steps skipped", f"{run.steps_skipped}, because the loss or gradient was not finite"
    row = run.last_row
    if restarts := table(row, "restarts"):
        sequences = row.get("sequences/resumed")
        resumed = f"; {sequences} sequences resumed on another engine" if sequences else ""
        yield "workers restarted", counts(restarts) + resumed
    if tokens := row.get("tokens/resumed"):
        yield "resumed", f"{tokens} tokens of groups in flight were reused"
    if run.replayed:
        yield "groups replayed", str(run.replayed)
    yield "tokens wasted", counts(table(row, "tokens/wasted"))
    if staleness := table(row, "tokens/wasted_staleness"):
        means = (f"{reason} {mean:.2f}" for reason, mean in staleness.items())
        yield "", f"mean staleness: {', '.join(means)}"
    if any(run.cancelled.values()):
        yield "", f"cancelling saved about {row['tokens/saved']} tokens"


def _worker(shares: Shares) -> str:
    doing = [f"{name} {share:.0%}" for name, share in _by_share(shares.doing)]
    waiting = [f"{name} {share:.0%}" for name, share in _by_share(shares.waiting)]
    text = f"{shares.busy:.0%} busy ({', '.join(doing)})" if doing else "0% busy"
    return f"{text}, waits: {', '.join(waiting)}" if waiting else text


def _by_share(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """Largest first, without shares that round to 0 %."""
    named = [(name, share) for name, share in shares.items() if share >= 0.005]
    return sorted(named, key=lambda item: -item[1])


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _scorers(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    scorers: dict[str, dict[str, float]] = {}
    for key, value in table(row, "scorer").items():
        name, _, metric = key.rpartition("/")
        scorers.setdefault(name, {})[metric] = value
    return scorers


def _files(run_dir: RunDir) -> Iterator[Path]:
    files = (run_dir.config, run_dir.metrics, run_dir.trace, run_dir.summary)
    yield from (file for file in files if file.is_file())
    folders = (run_dir.rollouts, run_dir.skipped, run_dir.logs, run_dir.tensorboard)
    yield from (folder for folder in folders if folder.is_dir() and any(folder.iterdir()))
    yield from run_dir.checkpoint_paths
