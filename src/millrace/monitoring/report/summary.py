"""The summary of a run directory, whether its run finished, is running, or was killed, as one block
of text that has what a bug report needs; and the status of every task that was issued, for
`millrace inspect --ledger`.

Promise: reads only, also while the run is alive. A missing or incomplete file costs only the rows
that it would have filled.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from millrace.config import ModelConfig, RunConfig
from millrace.core.errors import ConfigError, printable
from millrace.journal import JournalHistory, read_journal
from millrace.journal.ledger import TRAINED
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
    return printable("\n".join(f"{label:<{width}}{text}" for label, text in rows))


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
    final = run_dir.read_summary()
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


def accuracy_by_step(rows: list[dict[str, Any]], final: Mapping[str, Any]) -> dict[int, float]:
    """Held-out accuracy by the step after which it was measured; `final`: the summary.json."""
    found = {row["eval/step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    last_step = rows[-1]["step"] if rows else 0
    ends = {0: final.get("accuracy_before"), last_step: final.get("accuracy_after")}
    return found | {step: accuracy for step, accuracy in ends.items() if accuracy is not None}


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
    elif accuracies := accuracy_by_step(metrics, {}):
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


STEPS_SHOWN = 10
RANGES_SHOWN = 20


def read_report(path: str | Path) -> JournalHistory:
    history = read_journal(RunDir(path).journal, list_closed=True)
    if history is None:
        raise ConfigError(
            f"{path} has no journal: it is not a run directory, or journal.max_bytes was 0."
        )
    return history


def ledger_table(report: JournalHistory) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for label, count, text in _rows(report):
        table.add_row(Text(printable(label)), f"{count}", text)
    return table


def _rows(report: JournalHistory) -> Iterator[tuple[str, int, str]]:
    ledger = report.ledger
    yield "issued", ledger.next_number, f"0-{ledger.next_number - 1}" if ledger.next_number else ""
    trained = _ranges(report.closed.get(TRAINED, []))
    # Versions begin at 0, and each step makes one.
    begun = [version for version, step in ledger.steps.items() if not step.is_applied]
    steps = f"by {min(begun, default=ledger.last_step + 1) - 1} steps"
    yield TRAINED, ledger.totals[TRAINED], f"{steps}: {trained}" if trained else steps
    for status, count in sorted(ledger.totals.items()):
        if status != TRAINED:
            yield status, count, _ranges(report.closed.get(status, []))
    for status, numbers in report.pending.items():
        yield status, len(numbers), _ranges(numbers)
    for version, step in list(ledger.steps.items())[-STEPS_SHOWN:]:
        replayed = f"; replayed {_ranges(step.replayed)}" if step.replayed else ""
        yield f"step {version}, {step.status}", len(step.numbers), _ranges(step.fresh) + replayed


def _ranges(numbers: Iterable[int]) -> str:
    """Such as "0-4, 7"; the newest ranges where there are many."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[-RANGES_SHOWN:]]
    return ", ".join([*(["..."] if len(ranges) > RANGES_SHOWN else []), *shown])
