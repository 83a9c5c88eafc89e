"""What a run directory says about its run, whether it finished, still runs, or was killed.

Promise: reads only; a file that is missing or cut short costs the lines it would have filled.
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
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.rates import WORTH_SAYING, total_text
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.text import counts, curve, duration, rate


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Means are over all steps so far; None where the run has not said yet."""

    run_dir: Path
    state: Literal["running", "finished", "stopped"]
    steps: int
    seconds: float | None
    rewards: tuple[float, ...]  # mean of each step
    accuracy_before: float | None
    accuracy_after: float | None
    accuracies: dict[int, float]  # by step, where evaluated on the way
    samples_per_s: float | None
    tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    rollout_spread: float | None  # versions between its oldest and newest token
    group_spread: float | None
    workers: dict[str, Shares | None]  # None = never came past its start-up
    dropped: dict[str, int]  # groups, by reason
    cancelled: dict[str, int]  # tries that grew too old, by what they were at
    tokens_saved: int  # by not going on with these; estimated
    tokens_wasted: dict[str, int]  # sampled and never trained, by reason
    wasted_staleness: dict[str, float]  # of these, on average
    replayed: int  # groups trained a second time
    failed: dict[str, int]
    steps_skipped: int  # an update or more of these was not finite
    restarts: dict[str, int]  # by worker, of those that died
    sequences_continued: int  # after their engine had died
    resumed_tokens: int  # not sampled again when the run was resumed
    scorers: dict[str, dict[str, float]]  # as the last row has them
    files: tuple[Path, ...]  # what lies in the run directory


def summarise(path: str | Path) -> RunSummary:
    run_dir = RunDir(path)
    if not run_dir.exists and not run_dir.metrics.is_file():
        raise ConfigError(
            f"{path} is not a run directory: it holds neither config.toml with run.lock"
            " nor metrics.jsonl; name the folder that run_dir named."
        )
    rows = read_metrics(run_dir.metrics)
    last = rows[-1] if rows else {}
    final = json.loads(run_dir.summary.read_text()) if run_dir.is_finished else {}
    activity = Activity()
    activity.add(read_trace(run_dir.trace))
    stopped = "finished" if run_dir.is_finished else "stopped"
    return RunSummary(
        run_dir=run_dir.path,
        state="running" if run_dir.is_running else stopped,
        steps=last.get("step", 0),
        seconds=final.get("seconds", last.get("time_s")),
        rewards=tuple(row["reward_mean"] for row in rows if row.get("reward_mean") is not None),
        accuracy_before=final.get("accuracy_before"),
        accuracy_after=final.get("accuracy_after"),
        accuracies={
            r.get("evaluation_step", r["step"]): r["accuracy"]
            for r in rows
            if r.get("accuracy") is not None
        },
        samples_per_s=final.get("samples_per_s", _mean(rows, "samples_per_s")),
        tokens_per_s=_mean(rows, "tokens_per_s"),
        staleness_mean=_mean(rows, "staleness_mean"),
        staleness_max=max((r["staleness_max"] for r in rows if "staleness_max" in r), default=None),
        rollout_spread=_mean(rows, "rollout_spread_mean"),
        group_spread=_mean(rows, "group_spread_mean"),
        workers=activity.total(),
        dropped=last.get("groups_dropped", {}),
        cancelled=last.get("groups_cancelled", {}),
        tokens_saved=last.get("tokens_saved", 0),
        tokens_wasted=last.get("tokens_wasted", {}),
        wasted_staleness=last.get("wasted_staleness", {}),
        replayed=sum(row.get("replayed_groups", 0) for row in rows),
        failed=last.get("groups_failed", {}),
        steps_skipped=sum(row.get("updates_skipped", 0) > 0 for row in rows),
        restarts=last.get("worker_restarts", {}),
        sequences_continued=last.get("sequences_continued", 0),
        resumed_tokens=last.get("resumed_tokens", 0),
        scorers=last.get("scorers", {}),
        files=tuple(_files(run_dir)),
    )


def summary_table(summary: RunSummary) -> Table:
    """For the terminal: one row per fact."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(summary):
        table.add_row(label, text)
    return table


def _rows(run: RunSummary) -> Iterator[tuple[str, str]]:
    yield "run", f"{run.run_dir} ({run.state})"
    time = "" if run.seconds is None else f" in {duration(run.seconds)}"
    yield "steps", f"{run.steps}{time}"
    if run.rewards:
        line = curve(run.rewards, columns=40, rows=1).lines[0]
        yield "reward", f"{run.rewards[0]:.3f} → {run.rewards[-1]:.3f}  {line}"
    if run.accuracy_before is not None and run.accuracy_after is not None:
        yield "held-out accuracy", f"{run.accuracy_before:.3f} → {run.accuracy_after:.3f}"
    elif run.accuracies:
        step = max(run.accuracies)
        yield "held-out accuracy", f"{run.accuracies[step]:.3f} at step {step}"
    if run.samples_per_s is not None:
        tokens = "" if run.tokens_per_s is None else f", {rate(run.tokens_per_s)} tokens/s"
        yield "speed", f"{rate(run.samples_per_s)} samples/s{tokens}"
    if run.staleness_mean is not None:
        yield "staleness", f"{run.staleness_mean:.2f} on average, at most {run.staleness_max}"
    if run.rollout_spread is not None and run.group_spread is not None:
        yield "", f"spread {run.rollout_spread:.2f} in a rollout, {run.group_spread:.2f} in a group"
    for worker, shares in run.workers.items():
        yield worker, "never came up" if shares is None else _worker(shares)
    trainer = run.workers.get("trainer")
    waited = 0.0 if trainer is None else trainer.waiting.get("scores", 0.0)
    if waited >= WORTH_SAYING:
        yield "scoring", f"limited the run: the trainer waited for scores {waited:.0%} of its time"
    for name, load in run.scorers.items():
        yield f"scorer {name}", total_text(load)
    yield "groups dropped", counts(run.dropped)
    yield "groups cancelled", counts(run.cancelled)
    yield "groups failed", counts(run.failed)
    if run.steps_skipped:
        yield "steps skipped", f"{run.steps_skipped}, with a loss or gradient that was not finite"
    if run.restarts:
        continued = f"; {run.sequences_continued} sequences went on elsewhere"
        yield (
            "workers restarted",
            counts(run.restarts) + (continued if run.sequences_continued else ""),
        )
    if run.resumed_tokens:
        yield "resumed", f"{run.resumed_tokens} tokens of groups in flight were not sampled again"
    if run.replayed:
        yield "groups replayed", str(run.replayed)
    yield "tokens wasted", counts(run.tokens_wasted)
    if run.wasted_staleness:
        means = (f"{reason} {mean:.2f}" for reason, mean in run.wasted_staleness.items())
        yield "", f"their staleness: {', '.join(means)}"
    if any(run.cancelled.values()):
        yield "", f"about {run.tokens_saved} more saved by cancelling"
    for number, file in enumerate(run.files):
        yield "" if number else "files", os.fspath(file)


def _worker(shares: Shares) -> str:
    doing = [f"{name} {share:.0%}" for name, share in _by_share(shares.doing)]
    waiting = [f"{name} {share:.0%}" for name, share in _by_share(shares.waiting)]
    text = f"{shares.busy:.0%} busy ({', '.join(doing)})" if doing else "0% busy"
    return f"{text}, waits: {', '.join(waiting)}" if waiting else text


def _by_share(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """Largest first, without what rounds to nothing."""
    named = [(name, share) for name, share in shares.items() if share >= 0.005]
    return sorted(named, key=lambda item: -item[1])


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def _files(run_dir: RunDir) -> Iterator[Path]:
    files = (run_dir.config, run_dir.metrics, run_dir.trace, run_dir.summary)
    yield from (file for file in files if file.is_file())
    folders = (run_dir.rollouts, run_dir.skipped, run_dir.logs, run_dir.tensorboard)
    yield from (folder for folder in folders if folder.is_dir() and any(folder.iterdir()))
    yield from run_dir.checkpoint_paths
