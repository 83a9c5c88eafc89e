"""Endless task streams: in order, shuffled by epoch, by curriculum, or mixed from several sources.

Promise: the task behind a number depends on the tasks, the seed, the number and, with a curriculum,
on earlier scores; it never depends on time. State that cannot be recomputed is in state(), which
checkpoints store. Only the controller's event loop calls a stream.
"""

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeGuard

import numpy as np

from millrace.core.records import Group, Task

MEMORY = 0.5  # weight of the previous mean when a new group arrives
TARGET = 0.5  # solve rate at which the scores of a group vary most, and so teach most
EXPLORE_SHARE = 0.25  # of all groups: these take every task in turn, so that none is forgotten
WIDTH = 0.2  # standard deviation of the Gaussian


class TaskStream:
    """Assigns a task to each number; the defaults are for streams in which the number decides."""

    def task(self, number: int) -> Task:
        raise NotImplementedError

    def observe(self, number: int, solve_rate: float) -> None:
        """Record the share of solved episodes in the scored group of this number."""

    def finish(self, number: int) -> None:
        """Forget a number that will not be requested again."""

    def draw_of(self, number: int) -> int | None:
        """Return the draw that chose this number's task; None if the number alone decides."""
        return None

    def redrawn(self, number: int, draw: int | None) -> Task:
        """Return the task that a recorded draw chose for a number, even a finished one."""
        return self.task(number)

    def remember(self, number: int, draw: int | None) -> None:
        """Restore the recorded draw of an unfinished number."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned."""


class Epochs(TaskStream):
    """Repeats the tasks, each once per epoch, reshuffled or always in the same order."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool) -> None:
        assert tasks, "a stream needs at least one task"
        self._tasks = tuple(tasks)
        self._seed = seed % 2**64  # numpy takes no negative seeds
        self._shuffle = shuffle
        # Permutations of the newest two epochs: groups in flight can belong to both.
        self._orders: dict[int, np.ndarray] = {}

    def task(self, number: int) -> Task:
        return self._tasks[self.index(number)]

    def index(self, number: int) -> int:
        epoch, position = divmod(number, len(self._tasks))
        if not self._shuffle:
            return position
        if epoch not in self._orders:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return int(self._orders[epoch][position])


class Mixture(TaskStream):
    """Interleaves several streams by weight. Sources alternate in a fixed, evenly spread cycle: at
    any number, no source is a whole group ahead of its share."""

    CYCLE = 1000  # numbers; weights are rounded to 1/1000 of their sum

    def __init__(self, streams: Mapping[str, TaskStream], *, weights: Sequence[float]) -> None:
        self._streams = dict(streams)
        self._names = list(streams)
        self._slots = slots = _slots(weights, total=self.CYCLE)  # numbers per cycle, by source
        self._turns = _turns(slots)  # [CYCLE] source of each number in a cycle
        self._ranks = np.zeros(len(self._turns), np.int64)  # [CYCLE] among slots of the same source
        for source, num_slots in enumerate(slots):
            self._ranks[self._turns == source] = np.arange(num_slots)

    @property
    def shares(self) -> dict[str, float]:
        return {n: slots / self.CYCLE for n, slots in zip(self._names, self._slots, strict=True)}

    def task(self, number: int) -> Task:
        name, own = self.locate(number)
        return self._streams[name].task(own)

    def observe(self, number: int, solve_rate: float) -> None:
        name, own = self.locate(number)
        self._streams[name].observe(own, solve_rate)

    def finish(self, number: int) -> None:
        name, own = self.locate(number)
        self._streams[name].finish(own)

    def draw_of(self, number: int) -> int | None:
        name, own = self.locate(number)
        return self._streams[name].draw_of(own)

    def redrawn(self, number: int, draw: int | None) -> Task:
        name, own = self.locate(number)
        return self._streams[name].redrawn(own, draw)

    def remember(self, number: int, draw: int | None) -> None:
        name, own = self.locate(number)
        self._streams[name].remember(own, draw)

    def state(self) -> dict[str, Any]:
        states = {name: stream.state() for name, stream in self._streams.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, stream in self._streams.items():
            stream.restore(state.get(name, {}))

    def locate(self, number: int) -> tuple[str, int]:
        cycle, slot = divmod(number, self.CYCLE)
        source = int(self._turns[slot])
        return self._names[source], cycle * self._slots[source] + int(self._ranks[slot])


def _slots(weights: Sequence[float], *, total: int) -> list[int]:
    """Divide `total` slots by weight, at least one each, by the largest-remainder method."""
    assert len(weights) <= total
    exact = np.array(weights, np.float64) / sum(weights) * total
    slots = np.maximum(np.floor(exact), 1).astype(int)
    while (missing := total - int(slots.sum())) != 0:
        change = 1 if missing > 0 else -1
        # Take a slot from a source with more than one; give it to the largest remainder.
        lack = np.where((slots > 1) | (change > 0), change * (exact - slots), -np.inf)
        slots[int(lack.argmax())] += change
    return slots.tolist()


def _turns(slots: Sequence[int]) -> np.ndarray:
    """Assign each turn to the source that is furthest behind its share."""
    total = sum(slots)
    shares = np.array(slots) / total
    taken = np.zeros(len(slots), np.int64)
    turns = np.zeros(total, np.int64)
    for turn in range(total):
        behind = shares * (turn + 1) - taken
        behind[taken == slots] = -np.inf
        turns[turn] = behind.argmax()
        taken[turns[turn]] += 1
    return turns


class Curriculum(TaskStream):
    """Samples tasks whose measured solve rate is near a target.

    The solve rate of a task is a running mean over its recent groups. Sampling weights follow a
    Gaussian around the target rate; an unseen task counts as being at the target. A fixed share of
    the numbers ignores the weights and visits all tasks in turn, so that no task starves and old
    solve rates are measured again.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        target: float = TARGET,
        explore_share: float = EXPLORE_SHARE,
    ) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed % 2**64
        self._target = target
        self._explore_share = explore_share
        self._in_turn = Epochs(tasks, seed=seed, shuffle=True)
        self._rates = np.full(len(tasks), np.nan)  # [tasks]; NaN = not seen yet
        self._weights = np.ones(len(tasks))  # [tasks]
        self._drawn: dict[int, int] = {}  # task by number, until that is finished
        # Scores since the last draw. They are applied in the order of their numbers, so that the
        # order in which groups were scored does not matter.
        self._pending: list[tuple[int, int, float]] = []  # number, task, solve rate

    def task(self, number: int) -> Task:
        """Return the same task for a number until that number is finished."""
        if number not in self._drawn:
            self._learn()
            self._drawn[number] = self._draw(number)
        return self._tasks[self._drawn[number]]

    def observe(self, number: int, solve_rate: float) -> None:
        # A resumed group that was started with another task order was not drawn here.
        if number in self._drawn:
            self._pending.append((number, self._drawn[number], solve_rate))

    def finish(self, number: int) -> None:
        self._drawn.pop(number, None)

    def draw_of(self, number: int) -> int | None:
        self.task(number)
        return self._drawn[number]

    def redrawn(self, number: int, draw: int | None) -> Task:
        index = draw if self._is_known(draw) else self._in_turn.index(number)
        return self._tasks[index]

    def remember(self, number: int, draw: int | None) -> None:
        if self._is_known(draw):
            self._drawn[number] = draw

    def state(self) -> dict[str, Any]:
        self._learn()
        seen = np.flatnonzero(~np.isnan(self._rates)).tolist()
        return {
            "num_tasks": len(self._tasks),
            "solve_rates": {str(index): float(self._rates[index]) for index in seen},
            "drawn": {str(number): index for number, index in self._drawn.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the solve rates; those of a different task list are ignored."""
        if state.get("num_tasks") != len(self._tasks):
            return
        for index, rate in state["solve_rates"].items():
            self._set_rate(int(index), rate)
        self._drawn = {int(number): index for number, index in state["drawn"].items()}

    def _is_known(self, draw: int | None) -> TypeGuard[int]:
        """False for a draw from a different task list."""
        return draw is not None and draw < len(self._tasks)

    def _draw(self, number: int) -> int:
        turn = math.floor(number * self._explore_share)
        if math.floor((number + 1) * self._explore_share) > turn:
            return self._in_turn.index(turn)
        rng = np.random.default_rng((self._seed, 1, number))
        reach = self._weights.cumsum()
        drawn = int(np.searchsorted(reach, rng.random() * reach[-1], side="right"))
        return min(drawn, len(self._tasks) - 1)  # the product may round up to the total

    def _learn(self) -> None:
        for _, index, now in sorted(self._pending):
            before = float(self._rates[index])
            is_new = math.isnan(before)
            self._set_rate(index, now if is_new else MEMORY * before + (1 - MEMORY) * now)
        self._pending.clear()

    def _set_rate(self, index: int, rate: float) -> None:
        self._rates[index] = rate
        self._weights[index] = math.exp(-(((rate - self._target) / WIDTH) ** 2) / 2)


class LengthPredictor:
    """Predicts episode lengths per task, so that long episodes start first and leave fewer
    stragglers. A request may skip only a bounded number of queued requests, so none starves.
    Scheduling order does not change sampled tokens: each draw has its own seed."""

    def __init__(self, *, max_skips: int) -> None:
        """`max_skips`: queued requests that one of the longest task may skip; 0 disables it."""
        self._max_skips = max_skips
        self._means: dict[bytes, float] = {}  # mean tokens per episode, by task
        self._sorted: list[float] = []

    def priority(self, task: Task) -> int:
        """Return how many queued requests this task's requests may skip. The number grows with the
        share of known tasks that are shorter; an unknown task gets half of the maximum."""
        mean = self._means.get(_key(task))
        if not self._max_skips or not self._sorted:
            return 0
        if mean is None:
            return self._max_skips // 2
        return self._max_skips * bisect.bisect_left(self._sorted, mean) // len(self._sorted)

    def learn(self, group: Group) -> None:
        if not self._max_skips:
            return
        key = _key(group.task)
        known = self._means.get(key)
        mean = float(np.mean([sum(r.num_sampled for r in e.rollouts) for e in group.episodes]))
        if known is not None:
            del self._sorted[bisect.bisect_left(self._sorted, known)]
            mean = (known + mean) / 2  # the policy changes, so recent episodes count more
        self._means[key] = mean
        bisect.insort(self._sorted, mean)


def _key(task: Task) -> bytes:
    prompt = json.dumps(task.prompt, sort_keys=True, default=repr)
    return blake2b(prompt.encode(), digest_size=16).digest()
