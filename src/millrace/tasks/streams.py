"""Endless task streams: sequential, shuffled by epoch, or mixed from several sources.

Promise: the task behind a number depends on the tasks, the seed, the number and, with a curriculum,
on earlier scores; it never depends on time. State that cannot be recomputed is in state(), which
checkpoints store. Only the controller's event loop calls a stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.core.records import Task


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
    """Repeats the tasks epoch by epoch, reshuffled or always in the same order. Each task occurs
    exactly once per epoch."""

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
        return int(self._order(epoch)[position]) if self._shuffle else position

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return order


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
        """Return the source of a number, and the number within that source."""
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
