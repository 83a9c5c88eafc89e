"""Whether scoring limits the run, and by how much. Called from the controller's event loop."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from millrace.core.scorer_load import ScorerLoad

WORTH_SAYING = 0.1  # share of the trainer's time spent waiting for scores


class ScorerRates:
    """How busy each scorer was between two rows of the metrics."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since_s = now()
        self._last: Mapping[str, ScorerLoad] = {}

    def row(self, loads: Mapping[str, ScorerLoad]) -> dict[str, dict[str, float]]:
        """By scorer, since the row before."""
        now_s = self._now()
        seconds = max(now_s - self._since_s, 1e-9)
        row = {name: self._one(load, self._last.get(name), seconds) for name, load in loads.items()}
        self._since_s, self._last = now_s, loads
        return row

    def _one(self, load: ScorerLoad, last: ScorerLoad | None, seconds: float) -> dict[str, float]:
        busy_s = load.busy_s - (last.busy_s if last else 0.0)
        waiting_s = load.waiting_s - (last.waiting_s if last else 0.0)
        num_judged = load.episodes - (last.episodes if last else 0)
        return {
            "waiting": load.waiting,
            "in_flight": load.in_flight,
            "concurrency": load.concurrency,
            "busy": busy_s / (seconds * load.concurrency),
            "wait_s": waiting_s / max(num_judged, 1),  # of an episode, for its call
            "episodes": load.episodes,
            "calls": load.calls,
            "retries": load.retries,
            "failures": load.failures,
            "skipped": load.skipped,
            "breaker_opened": load.breaker_opened,
            "lost": load.lost,
        }


def limit_text(loads: Mapping[str, ScorerLoad], *, waited: float) -> str:
    """While scoring limits the run, that it does; else "". `waited`: the share of its recent time
    that the trainer has waited for scores."""
    if waited < WORTH_SAYING:
        return ""
    where = where_text(loads)
    text = f"scoring limits the run: the trainer waits for it {waited:.0%}"
    return f"{text}; {where}" if where else text


def where_text(loads: Mapping[str, ScorerLoad]) -> str:
    """What is at which scorer."""
    return "; ".join(text for name, load in loads.items() if (text := _where(name, load)))


def _where(name: str, load: ScorerLoad) -> str:
    """What a scorer has to do with it, if anything."""
    if not load.in_flight and not load.waiting:
        return ""
    text = f"{name} {load.in_flight}/{load.concurrency} busy"
    if load.waiting:
        text += f", {load.waiting} episodes wait"
    return f"{text} until it can be asked again" if load.is_held else text


def total_text(row: Mapping[str, Any]) -> str:
    """What a scorer's part of the last row says about the whole run."""
    text = f"{row['episodes']} episodes in {row['calls']} calls"
    counted = {"retries": "tried again", "failures": "given up", "skipped": "episodes gated out"}
    counted |= {"breaker_opened": "times out of reach", "lost": "processes replaced"}
    said = [f"{row[key]} {what}" for key, what in counted.items() if row.get(key)]
    return ", ".join([text, *said])
