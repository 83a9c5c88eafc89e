"""Simulated workers on a virtual clock: engines with continuous batching, and the host they share.

Promise: the clock jumps to the next event, so a simulation takes no longer than its events. An
event of an engine costs the same for any number of running sequences.
"""

import asyncio
import bisect
import heapq
import itertools
import math
import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.config import RunConfig
from millrace.core.errors import RunFailed
from millrace.core.spans import Span
from millrace.environments.rollouts.partial_rollouts import Expired
from millrace.plan.model_costs import Costs

_CHUNK_TOKENS = 256  # the step time of a batch is computed again at least this often
_LAUNCH_STEPS = 32  # of the embedded engine on a GPU, by default
_MAX_SPANS = 20_000
SpeedOf = Callable[[str, int], float]  # of a worker, while so many are busy; 1 = as if alone


class VirtualClock(selectors.DefaultSelector):
    """The selector of an event loop whose clock jumps to the next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RunFailed("The simulated run stands still: no worker has anything to do.")
        self.now_s += max(timeout, 0.0)
        return super().select(0)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        loop.time = lambda: self.now_s
        return loop


class SimulatedHost:
    """Which workers are busy, how fast they are, and their spans."""

    def __init__(self, speed_of: SpeedOf | None) -> None:
        """`speed_of`: None if workers do not slow each other down."""
        self._speed_of = speed_of
        self._doing: dict[str, tuple[str, bool, float]] = {}  # activity, busy, since
        self.busy_s: dict[str, float] = {}  # by worker
        self.spans: list[Span] = []
        self.changed: list[asyncio.Event] = []  # set when the speed changes

    def speed(self, worker: str) -> float:
        if self._speed_of is None:
            return 1.0
        num_busy = sum(busy for _, busy, _ in self._doing.values())
        return 1.0 if num_busy < 2 else self._speed_of(worker, num_busy)

    def enter(self, worker: str, name: str, *, busy: bool) -> None:
        before, now_s = self._doing.get(worker), asyncio.get_running_loop().time()
        if before is None or before[:2] != (name, busy):
            self._end(worker, now_s)
            self._doing[worker] = (name, busy, now_s)
            if self._speed_of is not None:
                for event in self.changed:
                    event.set()

    def busy_until_now(self) -> dict[str, float]:
        """Busy seconds of each worker, with those of its present activity."""
        now_s = asyncio.get_running_loop().time()
        return {
            worker: self.busy_s.get(worker, 0.0) + (now_s - since_s) * busy
            for worker, (_, busy, since_s) in self._doing.items()
        }

    def close(self) -> None:
        for worker in self._doing:
            self._end(worker, asyncio.get_running_loop().time())

    def _end(self, worker: str, now_s: float) -> None:
        name, busy, since_s = self._doing.get(worker, ("", False, now_s))
        self.busy_s[worker] = self.busy_s.get(worker, 0.0) + (now_s - since_s) * busy
        if now_s > since_s and len(self.spans) < _MAX_SPANS:
            span = Span(worker=worker, name=name, busy=busy, start_s=since_s, end_s=now_s)
            self.spans.append(span)

    async def work(self, worker: str, name: str, seconds: float) -> None:
        """`seconds` of a worker alone."""
        self.enter(worker, name, busy=True)
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        self.changed.append(changed)
        while seconds > 1e-12:
            speed, began_s = self.speed(worker), loop.time()
            await event_or(changed, seconds / speed)
            seconds -= (loop.time() - began_s) * speed
        self.changed.remove(changed)


async def event_or(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most this long; True if it came. A timer that sets the event costs
    half as much as asyncio.timeout()."""
    event.clear()
    loop = asyncio.get_running_loop()
    timer = loop.call_later(seconds, event.set)
    await event.wait()
    timer.cancel()
    return loop.time() < timer.when() - 1e-9


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    prompt: float
    tokens: int  # to sample
    prefill: float  # tokens to compute before the first; members of a request share them
    done: asyncio.Future[None]
    begin: float = 0.0  # decode steps of its engine before its first token


class SimulatedEngine:
    """All running sequences advance one token per decode step; progress is counted in steps. On a
    GPU, a launch has many steps, and slots that become free are filled after it."""

    def __init__(
        self, name: str, *, config: RunConfig, costs: Costs, host: SimulatedHost, unit: float
    ) -> None:
        """`unit`: tokens for which finish() returns one version."""
        self.name = name
        self.tokens = self.steps = 0.0  # sampled, and decode steps, until the last event
        self._config, self._costs, self._host, self._unit = config, costs, host, unit
        self._queue: deque[SimulatedSequence] = deque()
        self._running: dict[SimulatedSequence, None] = {}  # a set in order
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, SimulatedSequence]] = []  # heap, by decode step
        self._offset = 0.0  # sum of prompt - begin over running sequences
        self._swaps = [(0.0, 0)]  # decode steps before each version
        self._debt_s = 0.0  # prefill and swaps before the next decode step
        self._is_idle = True
        default = 1 if costs.device == "cpu" or config.engine.type != "embedded" else _LAUNCH_STEPS
        self._launch_steps = config.engine.options.get("decode_steps") or default
        self._launch_end = 0.0  # in decode steps; of several launches, if nothing ends in the first
        self._launch_size = 1
        # Since when it works on the present batch, how fast, and the seconds of a decode step.
        self._since_s, self._speed, self._step_s = 0.0, 0.0, 1.0
        self._wake = asyncio.Event()
        self._drained: asyncio.Event | None = None  # while it starts no sequence
        self._is_paused = False

    @property
    def sampled(self) -> float:
        """Tokens until now."""
        seconds = (asyncio.get_running_loop().time() - self._since_s) * self._speed
        steps = max(0.0, seconds - self._debt_s) / self._step_s
        return self.tokens + steps * len(self._running)

    @property
    def load(self) -> int:
        return len(self._queue) + len(self._running)

    def add(self, *, prompt: float, tokens: int, prefill: float) -> SimulatedSequence:
        future = asyncio.get_running_loop().create_future()
        sequence = SimulatedSequence(prompt, tokens, prefill, future)
        self._queue.append(sequence)
        self._wake.set()
        return sequence

    async def finish(self, sequence: SimulatedSequence) -> np.ndarray:
        """Versions of the sampled tokens."""
        try:
            await sequence.done
        finally:
            self.remove(sequence)
        begin, unit, first = sequence.begin, self._unit, self._swap_before(sequence)
        swaps = [swap for swap in self._swaps[first:] if swap[0] < begin + sequence.tokens]
        bounds = [round((at - begin) / unit) for at, _ in swaps[1:]]
        bounds = [0, *bounds, max(1, round(sequence.tokens / unit))]
        versions = np.array([version for _, version in swaps], np.int32)
        return np.repeat(versions, np.diff(bounds))

    def remove(self, sequence: SimulatedSequence) -> None:
        if sequence in self._running:
            self._catch_up()
            self._leave(sequence)
            self._wake.set()
        elif sequence in self._queue:
            self._queue.remove(sequence)

    def expire(self, oldest: int) -> None:
        for sequence in self._running:
            is_old = self._swaps[self._swap_before(sequence)][1] < oldest
            if is_old and not sequence.done.done():
                sequence.done.set_exception(Expired())

    async def swap(self, version: int) -> None:
        interrupt, recomputes = self._config.weights.interrupt, self._config.engine.kv != "keep"
        if interrupt == "save":  # the version is announced, and all sequences wait for its weights
            self._is_paused = True
            self._wake.set()
            await asyncio.sleep(self._costs.publish_s)
            self._is_paused = False
        if interrupt in ("drain", "barrier") and self._running:
            self._drained = asyncio.Event()
            await self._drained.wait()
            self._drained = None
        self._catch_up()
        self._debt_s += self._costs.swap_s
        if (recomputes or interrupt == "abort") and (num := len(self._running)):
            self._debt_s += num * self._costs.prefill_s(self._context / num)
        self._swaps.append((self.steps, version))
        self._launch_end = self.steps  # the swap ends a launch
        self._wake.set()

    async def run(self) -> None:
        host, loop = self._host, asyncio.get_running_loop()
        host.changed.append(self._wake)
        while True:
            is_over = self.steps > self._launch_end - 1e-6
            if not self._is_paused and (is_over or self._launch_steps == 1 or not self._running):
                self._launch()
            if self._is_paused or not self._running:
                self._is_idle, self._speed = not self._running, 0.0
                reason = "waiting for weights" if self._is_paused else "no work"
                host.enter(self.name, reason, busy=False)
                self._wake.clear()
                await self._wake.wait()
                continue
            host.enter(self.name, "generate", busy=True)
            steps = min(_CHUNK_TOKENS, self._launch_end - self.steps)
            context = self._context + len(self._running) * steps / 2  # half-way
            self._step_s = self._costs.decode_s(len(self._running), context)
            self._speed, self._since_s = host.speed(self.name), loop.time()
            seconds = (self._debt_s + steps * self._step_s) / self._speed
            has_changed = await event_or(self._wake, seconds)
            self._catch_up()
            if has_changed:  # the present launch is the last one before what has changed
                left = max(0.0, self._launch_end - self.steps)
                self._launch_end -= left // self._launch_size * self._launch_size

    def _catch_up(self) -> None:
        """Count what was done until now; whoever changes the batch or the version calls this."""
        now_s = asyncio.get_running_loop().time()
        seconds, self._since_s = (now_s - self._since_s) * self._speed, now_s
        paid_s = min(seconds, self._debt_s)
        self._debt_s -= paid_s
        steps = (seconds - paid_s) / self._step_s
        self.steps += steps
        self.tokens += steps * len(self._running)

    @property
    def _context(self) -> float:
        """Tokens of all running sequences."""
        return self._offset + len(self._running) * self.steps

    def _swap_before(self, sequence: SimulatedSequence) -> int:
        return bisect.bisect_right(self._swaps, (sequence.begin, 2**31)) - 1

    def _launch(self) -> None:
        """Do as EmbeddedEngine: what has ended leaves, new sequences start, and a launch has fewer
        steps while others arrive or wait. Launches in which nothing ends are one event."""
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self._running:
                self.tokens -= self.steps - sequence.begin - sequence.tokens
                self._leave(sequence)
                if not sequence.done.done():
                    sequence.done.set_result(None)
        has_new = self._admit()
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        to_end = self._ends[0][0] - self.steps if self._ends else 0.0
        share = 4 if self._queue else 2 if has_new else 1
        size = self._launch_size = max(1, self._launch_steps // share)
        num_launches = 1 if has_new else max(1, math.ceil((to_end - 1e-6) / size))
        self._launch_end = self.steps + (to_end if self._launch_steps == 1 else num_launches * size)

    def _admit(self) -> bool:
        """Whether sequences start."""
        room, before = self._config.engine.max_sequences - len(self._running), len(self._running)
        while self._queue and room > 0 and self._drained is None:
            room -= 1
            sequence = self._queue.popleft()
            sequence.begin = self.steps
            self._running[sequence] = None
            self._offset += sequence.prompt - self.steps
            end = self.steps + sequence.tokens
            heapq.heappush(self._ends, (end, next(self._numbers), sequence))
            self._debt_s += self._costs.start_s
            if sequence.prefill:
                self._debt_s += self._costs.prefill_s(sequence.prefill)
        has_new = len(self._running) > before
        if has_new:
            self._debt_s += self._costs.first_s if self._is_idle else self._costs.admit_s
            self._is_idle = False
        return has_new

    def _leave(self, sequence: SimulatedSequence) -> None:
        del self._running[sequence]
        self._offset -= sequence.prompt - sequence.begin
        if self._drained is not None and not self._running:
            self._drained.set()
