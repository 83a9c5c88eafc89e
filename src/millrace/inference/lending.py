"""GPU lending: engines on the trainer's GPUs serve while it waits for a batch, and stop for a step.

A sleep and a wake take time. If the trainer has recently waited for less than that, lent engines
stay asleep until it has waited for as long (so a wrong prediction costs one more cycle at most).

Promise: no step begins before the lent engines have stopped. They stay asleep only while other
engines serve, which continue their sequences. Runs on the controller's event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from millrace.inference.pool import EnginePool

RECENT = 5  # waits, sleeps and wakes of which the medians count

_Seconds = partial(deque[float], maxlen=RECENT)


@dataclass(kw_only=True, eq=False)
class GpuLending:
    pools: Sequence[EnginePool] = ()  # whose lent engines stand still during a step
    sleeps: bool = False  # they give their memory back, too
    optional: EnginePool | None = None  # of these pools: its lent engines may stay asleep
    report: Callable[[str], None] = lambda _: None
    num_lent: int = 0  # times that the engines of `optional` have been woken between two steps
    num_kept: int = 0  # times that they stayed asleep
    _waits_s: deque[float] = field(default_factory=_Seconds)  # of the trainer, between two steps
    _sleeps_s: deque[float] = field(default_factory=_Seconds)
    _wakes_s: deque[float] = field(default_factory=_Seconds)
    _idle_since_s: float | None = None
    _keeps: bool = False
    _is_awake: bool = True
    _recall: asyncio.Event = field(default_factory=asyncio.Event)
    _waking: asyncio.Task[None] | None = None

    async def take_back(self) -> None:
        """Stop the lent engines before a step, and decide whether they wake up after it."""
        began_s = time.monotonic()
        if self._idle_since_s is not None:
            self._waits_s.append(began_s - self._idle_since_s)
        await self._settle()
        self._decide()
        began_s = time.monotonic()
        await asyncio.gather(
            *(
                pool.pause(
                    sleep=self.sleeps, which="lent", keeps=self._keeps and pool is self.optional
                )
                for pool in self.pools
            )
        )
        if self._is_awake:
            self._sleeps_s.append(time.monotonic() - began_s)
        self._is_awake = False

    async def lend(self, activities: asyncio.TaskGroup) -> None:
        """The step is over."""
        self._idle_since_s = time.monotonic()
        optional = self.optional
        await asyncio.gather(*(pool.resume() for pool in self.pools if pool is not optional))
        if optional is not None:
            self._recall = asyncio.Event()
            # The next step awaits this task, after it has waited for a batch.
            self._waking = activities.create_task(self._wake(optional), name="lend")

    async def finish(self) -> None:
        """Wake up what still sleeps, after the last step."""
        await self._settle()
        if self.optional is not None:
            await self.optional.resume()

    @property
    def metrics(self) -> dict[str, float]:
        if self.optional is None:
            return {}
        return {"lending/lent": float(self.num_lent), "lending/kept_asleep": float(self.num_kept)}

    async def _settle(self) -> None:
        self._recall.set()
        if self._waking is not None:
            await self._waking
        self._waking = None

    def _decide(self) -> None:
        if self.optional is None or not (self._waits_s and self._sleeps_s and self._wakes_s):
            return
        wait_s, cycle_s = median(self._waits_s), self._cycle_s
        keeps = wait_s < cycle_s and self.optional.can_spare_lent
        if keeps != self._keeps:
            self.report(
                f"The trainer waits for {wait_s:.2g} s between two steps, and a sleep and a wake of"
                f" the engines on its GPUs take {cycle_s:.2g} s:"
                f" {'they stay asleep until it waits for longer' if keeps else 'they are lent'}."
            )
        self._keeps = keeps

    @property
    def _cycle_s(self) -> float:
        return median(self._sleeps_s) + median(self._wakes_s)

    async def _wake(self, pool: EnginePool) -> None:
        if self._keeps:
            await pool.resume(held=False)
            try:
                async with asyncio.timeout(self._cycle_s):
                    await self._recall.wait()
            except TimeoutError:
                pass  # the trainer waits for longer than expected: lend the engines after all
            else:
                self.num_kept += 1
                return
        began_s = time.monotonic()
        await pool.resume()
        self._wakes_s.append(time.monotonic() - began_s)
        self._is_awake = True
        self.num_lent += 1
