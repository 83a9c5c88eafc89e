"""How busy workers and scorers are, what they wait for, and whether scoring limits the run.

Promise: the shares of one worker sum to 1 over the time that it reported. Start-up, such as loading
a model, is not counted. Called from the controller's event loop.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millrace.core.spans import ScorerLoad, Span

# Activities of a worker that is not serving yet, and how progress describes them.
STARTING = {
    "start": "starting the process",
    "load": "loading",
    "compile": "compiling and warming up",
}
ROLES = ("engine", "trainer")  # shown first, in this order
SCORES = "scores"  # the wait reason of the trainer and the engines when scoring is behind
MIN_BUSY = 0.005  # other workers that are less busy are not shown
MIN_SHARE = 0.1  # below this share of the trainer's time, waiting for scores is not reported
_NOT_IN_ROWS = ("busy_s", "waiting_s", "is_held")  # of a ScorerLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """One worker's time, as shares of 1."""

    busy: float
    doing: dict[str, float]  # by activity; sums to busy
    waiting: dict[str, float]  # by reason; sums to 1 - busy

    @property
    def top_wait(self) -> str | None:
        """The reason it waits for longest; None if it never waits."""
        return max(self.waiting, key=lambda reason: self.waiting[reason], default=None)


class Activity:
    """Spans by worker, as far as `window_s` back from a worker's last span."""

    def __init__(self, *, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._spans: dict[str, deque[Span]] = {}  # by worker

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            recent = self._spans.setdefault(span.worker, deque())
            if span.name in STARTING:
                continue
            recent.append(span)
            while recent[0].end_s <= span.end_s - self._window_s:
                recent.popleft()

    def recent(self) -> dict[str, Shares | None]:
        """The shares of each worker in the window, in order; None while it starts."""
        found: dict[str, Shares | None] = {}
        for worker in in_order(self._spans):
            spans = self._spans[worker]
            begin_s = spans[-1].end_s - self._window_s if spans else 0.0
            found[worker] = _shares(
                (s.name, s.busy, s.end_s - max(s.start_s, begin_s)) for s in spans
            )
        return found


def total_shares(spans: Iterable[Span]) -> dict[str, Shares | None]:
    """The shares of each worker over all spans, in order; None if it has never served."""
    whole = Activity(window_s=math.inf)
    whole.add(spans)
    return whole.recent()


def role_of(worker: str) -> str:
    """ "engine-3" is an engine."""
    role, _, number = worker.rpartition("-")
    return role if number.isdigit() else worker


def in_order(workers: Iterable[str]) -> list[str]:
    """Engines, then the trainer, then the others."""

    def rank(worker: str) -> tuple[int, str, int]:
        role = role_of(worker)
        place = ROLES.index(role) if role in ROLES else len(ROLES)
        return place, role, int(worker.removeprefix(role).removeprefix("-") or 0)

    return sorted(workers, key=rank)


def without_idle(workers: Mapping[str, Shares | None]) -> dict[str, Shares | None]:
    """Leave out scorers and other helpers that had next to nothing to do."""
    return {
        worker: shares
        for worker, shares in workers.items()
        if role_of(worker) in ROLES or shares is None or shares.busy >= MIN_BUSY
    }


def mean_by_role(workers: Mapping[str, Shares | None]) -> dict[str, Shares]:
    """Per role, the mean over its workers that have finished their start-up."""
    # The shares of each worker sum to 1, so all workers of a role count equally.
    times: defaultdict[str, list[tuple[str, bool, float]]] = defaultdict(list)
    for worker, shares in workers.items():
        if shares is not None:
            parts = ((True, shares.doing), (False, shares.waiting))
            times[role_of(worker)] += [
                (n, busy, s) for busy, part in parts for n, s in part.items()
            ]
    means = {role: _shares(of_role) for role, of_role in times.items()}
    return {role: mean for role, mean in means.items() if mean is not None}


def waited_for_scores(workers: Mapping[str, Shares | None]) -> float:
    trainer = mean_by_role(workers).get("trainer")
    return 0.0 if trainer is None else trainer.waiting.get(SCORES, 0.0)


def _shares(times: Iterable[tuple[str, bool, float]]) -> Shares | None:
    """`times`: names of activities or waits, whether the worker was busy, and how long."""
    seconds: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for name, busy, length in times:
        seconds[name, busy] += length
    whole_s = sum(seconds.values())
    if whole_s <= 0:
        return None
    doing = {name: s / whole_s for (name, busy), s in seconds.items() if busy}
    waiting = {name: s / whole_s for (name, busy), s in seconds.items() if not busy}
    return Shares(busy=sum(doing.values()), doing=doing, waiting=waiting)


class ScorerRates:
    """How busy each scorer was between two metrics rows."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since_s = now()
        self._last: Mapping[str, ScorerLoad] = {}

    def row(self, loads: Mapping[str, ScorerLoad]) -> dict[str, dict[str, float]]:
        """The load of each scorer since the last row."""
        now_s = self._now()
        seconds = max(now_s - self._since_s, 1e-9)
        row: dict[str, dict[str, float]] = {}
        for name, load in loads.items():
            last = self._last.get(name, ScorerLoad(concurrency=1))
            num_scored = max(load.episodes - last.episodes, 1)
            row[name] = {k: v for k, v in asdict(load).items() if k not in _NOT_IN_ROWS}
            row[name]["busy"] = (load.busy_s - last.busy_s) / (seconds * load.concurrency)
            row[name]["wait_s"] = (load.waiting_s - last.waiting_s) / num_scored  # of an episode
        self._since_s, self._last = now_s, loads
        return row


def limit_text(loads: Mapping[str, ScorerLoad], *, waited: float) -> str:
    """A warning while scoring limits the run; otherwise "". `waited`: see waited_for_scores()."""
    if waited < MIN_SHARE:
        return ""
    text = f"scoring limits the run: the trainer spends {waited:.0%} of its time waiting for scores"
    return "; ".join(filter(None, [text, queue_text(loads)]))


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
