"""How busy each worker is and what it waits for: over the last seconds, and over the whole run.

Promise: the shares of one worker sum to 1 over the time that it reported. Start-up, such as loading
a model, is not counted. Called from the controller's event loop.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from millrace.core.spans import Span

# Activities of a worker that is not serving yet, and how progress describes them.
STARTING = {
    "start": "starting the process",
    "load": "loading",
    "compile": "compiling and warming up",
}
ROLES = ("engine", "trainer")  # shown first, in this order


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


@dataclass(slots=True)
class _Worker:
    recent: deque[Span] = field(default_factory=deque)
    total_s: dict[tuple[str, bool], float] = field(default_factory=lambda: defaultdict(float))


class Activity:
    """Sums spans by worker; "recent" reaches `window_s` back from a worker's last span."""

    def __init__(self, *, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._workers: dict[str, _Worker] = {}

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            worker = self._workers.setdefault(span.worker, _Worker())
            if span.name in STARTING:
                continue
            worker.total_s[span.name, span.busy] += span.end_s - span.start_s
            worker.recent.append(span)
            while worker.recent[0].end_s <= span.end_s - self._window_s:
                worker.recent.popleft()

    def recent(self) -> dict[str, Shares | None]:
        """By worker, in order, over the window; None while a worker starts."""
        return {n: _shares(self._in_window(self._workers[n])) for n in in_order(self._workers)}

    def total(self) -> dict[str, Shares | None]:
        """By worker, in order, over the whole run; None while a worker starts."""
        return {n: _shares(self._workers[n].total_s) for n in in_order(self._workers)}

    def _in_window(self, worker: _Worker) -> dict[tuple[str, bool], float]:
        seconds: dict[tuple[str, bool], float] = defaultdict(float)
        if worker.recent:
            begin_s = worker.recent[-1].end_s - self._window_s
            for span in worker.recent:
                seconds[span.name, span.busy] += span.end_s - max(span.start_s, begin_s)
        return seconds


def role_of(worker: str) -> str:
    """ "engine-3" is an engine."""
    role, _, number = worker.rpartition("-")
    return role if number.isdigit() else worker


def in_order(workers: Iterable[str]) -> list[str]:
    """Engines, then the trainer, then the others."""

    def rank(worker: str) -> tuple[int, str, int]:
        role = role_of(worker)
        number = worker.removeprefix(f"{role}-")
        place = ROLES.index(role) if role in ROLES else len(ROLES)
        return place, role, int(number) if number.isdigit() else 0

    return sorted(workers, key=rank)


def mean_by_role(workers: Mapping[str, Shares | None]) -> dict[str, Shares]:
    """Per role, the mean over its workers that have finished their start-up."""
    members: dict[str, list[Shares]] = defaultdict(list)
    for worker, shares in workers.items():
        if shares is not None:
            members[role_of(worker)].append(shares)
    return {
        role: Shares(
            busy=sum(shares.busy for shares in rows) / len(rows),
            doing=_mean([shares.doing for shares in rows]),
            waiting=_mean([shares.waiting for shares in rows]),
        )
        for role, rows in members.items()
    }


def _mean(tables: list[dict[str, float]]) -> dict[str, float]:
    mean: dict[str, float] = defaultdict(float)
    for table in tables:
        for name, share in table.items():
            mean[name] += share / len(tables)
    return dict(mean)


def _shares(seconds: Mapping[tuple[str, bool], float]) -> Shares | None:
    whole_s = sum(seconds.values())
    if whole_s <= 0:
        return None
    doing = {name: s / whole_s for (name, busy), s in seconds.items() if busy}
    waiting = {name: s / whole_s for (name, busy), s in seconds.items() if not busy}
    return Shares(busy=sum(doing.values()), doing=doing, waiting=waiting)
