"""How busy each scorer is, and whether scoring limits the run.

Called from the controller's event loop.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from millrace.core.spans import ScorerLoad

MIN_SHARE = 0.1  # below this share of the trainer's time, waiting for scores is not reported


class ScorerRates:
    """How busy each scorer was between two metrics rows."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since_s = now()
        self._last: Mapping[str, ScorerLoad] = {}

    def row(self, loads: Mapping[str, ScorerLoad]) -> dict[str, dict[str, float]]:
        """By scorer, since the last row."""
        now_s = self._now()
        seconds = max(now_s - self._since_s, 1e-9)
        row = {name: _rates(load, self._last.get(name), seconds) for name, load in loads.items()}
        self._since_s, self._last = now_s, loads
        return row


def _rates(load: ScorerLoad, last: ScorerLoad | None, seconds: float) -> dict[str, float]:
    busy_s = load.busy_s - (last.busy_s if last else 0.0)
    waiting_s = load.waiting_s - (last.waiting_s if last else 0.0)
    num_scored = load.episodes - (last.episodes if last else 0)
    left_out = ("busy_s", "waiting_s", "is_held")
    return {
        **{name: value for name, value in asdict(load).items() if name not in left_out},
        "busy": busy_s / (seconds * load.concurrency),
        "wait_s": waiting_s / max(num_scored, 1),  # mean over episodes
    }


def limit_text(loads: Mapping[str, ScorerLoad], *, waited: float) -> str:
    """A warning while scoring limits the run; otherwise "". `waited`: the share of its recent time
    that the trainer spent waiting for scores."""
    if waited < MIN_SHARE:
        return ""
    text = f"scoring limits the run: the trainer spends {waited:.0%} of its time waiting for scores"
    queues = queue_text(loads)
    return f"{text}; {queues}" if queues else text


def queue_text(loads: Mapping[str, ScorerLoad]) -> str:
    """The scorers that have work, and how much of it."""
    texts: list[str] = []
    for name, load in loads.items():
        if load.in_flight or load.waiting:
            waiting = f", {load.waiting} episodes waiting" if load.waiting else ""
            held = " until the scorer is reachable again" if load.is_held else ""
            texts.append(f"{name} {load.in_flight}/{load.concurrency} busy{waiting}{held}")
    return "; ".join(texts)


def total_text(row: Mapping[str, Any]) -> str:
    """A scorer's totals over the whole run, from its part of the last metrics row."""
    labels = {
        "retries": "retries",
        "failures": "failed calls",
        "skipped": "episodes skipped by its gate",
        "breaker_opened": "outages",
        "lost": "processes replaced",
    }
    counted = [f"{row[key]} {label}" for key, label in labels.items() if row.get(key)]
    return ", ".join([f"{row['episodes']} episodes in {row['calls']} calls", *counted])
