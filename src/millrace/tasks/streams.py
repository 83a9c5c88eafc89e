"""The run's endless sequence of tasks: in turn, by difficulty, or mixed from several sources.

Promise: which task a number is depends on the tasks, the seed, the number and, with a curriculum,
on the outcomes so far; never on time. What cannot be computed again is in state(), for a
checkpoint. Used by the controller's loop alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from millrace.core.records import Task


class TaskStream(Protocol):
    def task(self, number: int) -> Task: ...

    def observe(self, number: int, solve_rate: float) -> None:
        """The group of this number was scored; solve_rate is the share of its episodes that are
        right."""
        ...

    def finish(self, number: int) -> None:
        """This number will not be asked for again."""
        ...

    def draw_of(self, number: int) -> int | None:
        """What decides on its task besides the number itself, if anything does."""
        ...

    def redrawn(self, number: int, draw: int | None) -> Task:
        """The task of a number for which this was drawn, also when it is finished."""
        ...

    def remember(self, number: int, draw: int | None) -> None:
        """This was drawn for the number, which is not finished."""
        ...

    def state(self) -> dict[str, Any]:
        """As JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Epochs:
    """Epoch after epoch, in a new order each time or always in the same. Within an epoch each task
    comes exactly once."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool) -> None:
        assert tasks, "a stream needs at least one task"
        self._tasks = tuple(tasks)
        self._seed = seed % 2**64  # numpy takes no negative seeds
        self._shuffle = shuffle
        # By epoch; the newest two, as groups straddle them.
        self._orders: dict[int, np.ndarray] = {}

    def task(self, number: int) -> Task:
        return self._tasks[self.index(number)]

    def index(self, number: int) -> int:
        epoch, position = divmod(number, len(self._tasks))
        return int(self._order(epoch)[position]) if self._shuffle else position

    def observe(self, number: int, solve_rate: float) -> None:
        """Outcomes change nothing here."""

    def finish(self, number: int) -> None:
        """Nothing is kept by number."""

    def draw_of(self, number: int) -> int | None:
        return None

    def redrawn(self, number: int, draw: int | None) -> Task:
        return self.task(number)

    def remember(self, number: int, draw: int | None) -> None:
        """The number says it all."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A stream and how much of the run it gets."""

    stream: TaskStream
    weight: float
    name: str


class Mixture:
    """Several streams as one, each with its share of the numbers.

    Sources take turns in a cycle that is as even as it can be: at any number, none has had a whole
    group more than its share.
    """

    CYCLE = 1000  # numbers; so weights are kept to a thousandth of their sum

    def __init__(self, sources: Sequence[Source]) -> None:
        assert sources
        self._streams = {source.name: source.stream for source in sources}
        self._names = [source.name for source in sources]
        slots = _slots([source.weight for source in sources], total=self.CYCLE)
        self._slots = slots  # numbers per cycle, by source
        self._turns = _turns(slots)  # [CYCLE] source of each number in a cycle
        ranks = np.zeros(len(self._turns), np.int64)
        for source in range(len(slots)):
            ranks[self._turns == source] = np.arange(slots[source])
        self._ranks = ranks  # [CYCLE] how many of the same source came before it in the cycle

    @property
    def shares(self) -> dict[str, float]:
        """Of all numbers, by source."""
        return dict(zip(self._names, (slots / self.CYCLE for slots in self._slots), strict=True))

    def task(self, number: int) -> Task:
        name, own = self.place(number)
        return self._streams[name].task(own)

    def observe(self, number: int, solve_rate: float) -> None:
        name, own = self.place(number)
        self._streams[name].observe(own, solve_rate)

    def finish(self, number: int) -> None:
        name, own = self.place(number)
        self._streams[name].finish(own)

    def draw_of(self, number: int) -> int | None:
        name, own = self.place(number)
        return self._streams[name].draw_of(own)

    def redrawn(self, number: int, draw: int | None) -> Task:
        name, own = self.place(number)
        return self._streams[name].redrawn(own, draw)

    def remember(self, number: int, draw: int | None) -> None:
        name, own = self.place(number)
        self._streams[name].remember(own, draw)

    def state(self) -> dict[str, Any]:
        states = {name: stream.state() for name, stream in self._streams.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, stream in self._streams.items():
            stream.restore(state.get(name, {}))

    def place(self, number: int) -> tuple[str, int]:
        """The source of a number, and which number it is to that source."""
        cycle, slot = divmod(number, self.CYCLE)
        source = int(self._turns[slot])
        return self._names[source], cycle * self._slots[source] + int(self._ranks[slot])


def _slots(weights: Sequence[float], *, total: int) -> list[int]:
    """`total` shared out by weight, at least one each; what rounding leaves goes to the largest
    remainders."""
    assert len(weights) <= total
    exact = np.array(weights, np.float64) / sum(weights) * total
    slots = np.maximum(np.floor(exact), 1).astype(int)
    while (missing := total - int(slots.sum())) != 0:
        change = 1 if missing > 0 else -1
        # Taken from those who can spare one, given to whoever lacks most.
        lack = np.where((slots > 1) | (change > 0), change * (exact - slots), -np.inf)
        slots[int(lack.argmax())] += change
    return slots.tolist()


def _turns(slots: Sequence[int]) -> np.ndarray:
    """Each turn goes to whoever is furthest behind its share."""
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
