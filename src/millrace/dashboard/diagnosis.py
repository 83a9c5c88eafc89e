"""Metrics of a run as columns, what limits the run, and what looks wrong in it, as sentences.

Promise: a curve has at most `points` values, each the mean of equally many steps; a step without a
value does not count. The diagnosis names one stage and the setting to change; an alert names a
metric, its values and what to look at. Used by one thread.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.monitoring.activity import MIN_SHARE, role_of
from millrace.monitoring.files.metrics import table

RECENT_ROWS = 20  # the newest steps, where a sentence says what the run does now
BUSY = 0.8  # a stage that is busy for this share of the time has little left to give
MIN_STALL_S, STALL_STEPS = 60.0, 10.0  # no step for so long, and for so many times the usual
# What an idle engine waits for: what that means, and the setting that changes it.
ENGINE_WAITS = {
    "staleness limit": ("Engines and trainer take turns", "buffer.max_staleness"),
    "max running groups": ("Too few groups are in flight", "rollout.max_running_groups"),
    "scores": ("Scoring holds generation back", "scoring.workers"),
    "tasks": ("Episodes wait for tasks or tools", "environment.workers"),
}
# By kind: a metric, whether its medians at the start and now are wrong, and what that means.
COMPARISONS: dict[str, tuple[str, Callable[[float, float], bool], str]] = {
    "entropy": (
        "entropy",
        lambda early, now: now <= min(0.3, 0.2 * early),
        "Entropy has collapsed from {early:.3g} to {now:.3g} nats, so the samples of a group hardly"
        " differ; lower optimizer.learning_rate, raise loss.high, or set loss.kl.",
    ),
    "reward": (
        "reward/std",
        lambda _early, now: now <= 0.02,
        "Reward is saturated: within a step its standard deviation is {now:.3f}, so advantages are"
        " close to 0; use other tasks, or stop the run.",
    ),
    "mismatch": (
        "mismatch/kl_k3",
        lambda early, now: now >= max(1e-3, 4.0 * early),
        "The mismatch of engine and trainer (mismatch/kl_k3) has grown from {early:.2g} to"
        " {now:.2g}; lower buffer.max_staleness, or give engine.dtype more precision.",
    ),
}

Json = dict[str, Any]


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
        """Values of the steps from `start` to `end` (inclusive); None where no step has one."""
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


def waits_of(role: str, recent: Mapping[str, float]) -> dict[str, float]:
    """Shares of the role's time by wait reason; with the busy share, they sum to 1."""
    sums: dict[str, float] = defaultdict(float)
    for key, share in table(recent, "waiting").items():
        worker, _, reason = key.partition("/")
        if role_of(worker) == role:
            sums[reason.replace("_", " ")] += share
    # A worker that never waits has no key, so the sum is scaled to the idle share of the role.
    scale = (1.0 - recent[f"busy/{role}"]) / (sum(sums.values()) or 1.0)
    return {reason: share * scale for reason, share in sums.items()}


def diagnose(recent: Mapping[str, float], settings: Mapping[str, Any]) -> Json:
    """`recent`: means over the newest steps; `settings`: by dotted key."""
    if not {"busy/engine", "busy/trainer"} <= recent.keys():
        return {"sentence": "The run has not finished a step yet.", "setting": None}
    engine_idle, trainer_idle = 1 - recent["busy/engine"], 1 - recent["busy/trainer"]
    engine, trainer = waits_of("engine", recent), waits_of("trainer", recent)
    top = max(engine, key=lambda reason: engine[reason], default="")
    is_held = engine_idle > 1 - BUSY and engine.get(top, 0.0) >= MIN_SHARE
    scores = trainer.get("scores", 0.0)
    waits = f"the trainer waits {trainer_idle:.0%} of its time"
    advice = ""
    if scores >= MIN_SHARE and scores >= trainer_idle / 2:
        scorer, setting = _slowest_scorer(recent, settings)
        what = f"Scoring limits the run: the trainer waits for scores {scores:.0%} of its time"
        what += scorer
    elif trainer_idle >= MIN_SHARE and trainer_idle >= engine_idle and is_held:
        meaning, setting = ENGINE_WAITS.get(top, ("Engines wait", "rollout.max_running_groups"))
        what = f"{meaning}: {waits}, and the engines wait {engine_idle:.0%} of theirs ({top})"
    elif trainer_idle >= MIN_SHARE and trainer_idle >= engine_idle:
        setting, advice = "engine.count", ", or lower sampling.max_new_tokens"
        busy = f"the engines are {1 - engine_idle:.0%} busy"
        what = f"Generation limits the run: {waits} while {busy}"
    elif engine_idle >= MIN_SHARE:
        setting, advice = "trainer.ranks", ", or use fewer engines"
        what = f"Training limits the run: the trainer is {1 - trainer_idle:.0%} busy, and the"
        what += f" engines wait {engine_idle:.0%} of their time ({top})"
    else:
        busy = f"engines are {1 - engine_idle:.0%} busy and the trainer is {1 - trainer_idle:.0%}"
        return {"sentence": f"No stage limits the run by much: {busy}.", "setting": None}
    value = settings.get(setting, "auto")
    now = "" if value == "auto" else f" (now {value})"
    return {"sentence": f"{what}; raise {setting}{now}{advice}.", "setting": setting}


def _slowest_scorer(recent: Mapping[str, float], settings: Mapping[str, Any]) -> tuple[str, str]:
    """A clause about it, and the setting that gives it more room."""
    busy = table(recent, "scorer", suffix="/busy")
    name = max(busy, key=lambda scorer: busy[scorer], default="")
    functions = [row for row in settings.get("scorers", ()) if row.get("function")]
    names = [row.get("name") or row["function"].rpartition(":")[2] for row in functions]
    setting = "scorers.concurrency" if busy and name not in names else "scoring.workers"
    return f", and scorer {name} is {busy[name]:.0%} busy" if busy else "", setting


def find_alerts(metrics: MetricColumns, *, idle_s: float | None) -> list[Json]:
    """`idle_s`: seconds since the last step of a live run; None of one that has ended."""
    found = {"stall": _stall(metrics, idle_s), "failures": _failures(metrics.last)}
    for kind, (key, is_wrong, sentence) in COMPARISONS.items():
        values = metrics.column(key)
        values = values[~np.isnan(values)]
        if len(values) >= 2 * RECENT_ROWS:
            early, now = np.median(values[:RECENT_ROWS]), np.median(values[-RECENT_ROWS:])
            found[kind] = sentence.format(early=early, now=now) if is_wrong(early, now) else ""
    return [{"kind": kind, "sentence": sentence} for kind, sentence in found.items() if sentence]


def _stall(metrics: MetricColumns, idle_s: float | None) -> str:
    times = metrics.column("time_s")[-RECENT_ROWS:]
    step_s = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    if idle_s is None or idle_s < max(MIN_STALL_S, STALL_STEPS * step_s):
        return ""
    usual = f"No step has finished for {idle_s:.0f} s, and a step took {step_s:.1f} s before"
    return f"{usual}; Flow and the logs show which stage stands still."


def _failures(row: Mapping[str, Any]) -> str:
    counts = {
        "groups failed": sum(table(row, "failed").values()),
        "restarts of workers": sum(table(row, "restarts").values()),
        "steps with updates that were not finite": row.get("skipped/steps") or 0,
    }
    texts = [f"{count} {what}" for what, count in counts.items() if count]
    return f"So far {', '.join(texts)}; the logs say why." if texts else ""
