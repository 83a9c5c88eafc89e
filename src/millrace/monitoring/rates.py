"""Whether scoring limits the run, and by how much. Called from the controller's event loop.

How stale the tokens of a step are, and how far apart the versions that sampled them.

A curve over a run of any length, in bounded memory: the longer it is, the coarser.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.core.records import Group
from millrace.core.spans import ScorerLoad
from millrace.core.staleness import Stamps

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


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, Any]:
    """Of the trained tokens, for a trainer at `version`. A spread is the newest version minus the
    oldest."""
    by_group = [[Stamps.of_rollout(rollout) for rollout in group.rollouts] for group in groups]
    wholes = [Stamps.joined(stamps) for stamps in by_group]
    tokens = Stamps.joined(wholes)
    assert tokens.oldest is not None, "a step learns something"
    within = [stamps.spread for of_group in by_group for stamps in of_group]
    across = [stamps.spread for stamps in wholes]
    num_tokens = tokens.num_tokens
    return {
        "staleness_mean": tokens.total_staleness(version) / num_tokens,
        "staleness_max": version - tokens.oldest,
        "staleness_histogram": {
            str(version - sampled_by): count / num_tokens
            for sampled_by, count in reversed(tokens.counts.items())
        },
        "rollout_spread_mean": float(np.mean(within)),
        "rollout_spread_max": max(within),
        "group_spread_mean": float(np.mean(across)),
        "group_spread_max": max(across),
    }


class Thinned:
    """Values in order. When there are more than `most`, neighbours are joined to their mean; the
    first and the last stay as they are."""

    def __init__(self, *, most: int = 2048) -> None:
        self._most = most
        self._first: float | None = None
        self._means: list[float] = []  # of `_each` values, behind the first
        self._each = 1
        self._open: list[float] = []  # behind these, and too few for a mean

    def add(self, value: float) -> None:
        if self._first is None:
            self._first = value
            return
        self._open.append(value)
        if len(self._open) > self._each:  # the last one stays as it is
            self._means.append(sum(self._open[:-1]) / self._each)
            del self._open[:-1]
        if len(self._means) == self._most:
            self._thin()

    @property
    def values(self) -> tuple[float, ...]:
        if self._first is None:
            return ()
        return (self._first, *self._means, *self._open[-1:])

    def _thin(self) -> None:
        pairs = zip(self._means[::2], self._means[1::2], strict=True)
        self._means = [(one + other) / 2 for one, other in pairs]
        self._each *= 2
