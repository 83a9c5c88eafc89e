"""Owns one worker: when it dies, another is started in its place.

Promise: a worker that dies is replaced, after a wait that doubles with each death; one that hangs
is ended, after it has written down where, and replaced alike. One that dies too often ends the run,
with how often, when, and its own last words in one error.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from millrace.cluster.messages import Progress
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, RunFailed
from millrace.supervision.deaths import Deaths, RestartLimits
from millrace.supervision.pulse import Pulse

CHECK_S = 0.25  # between two looks at a worker's progress


class Keeper:
    def __init__(
        self,
        worker: Worker,
        *,
        replace: Callable[[], Awaitable[Worker]],
        on_death: Callable[[], None],
        limits: RestartLimits,
        make_pulse: Callable[[], Pulse],
        remedy: str,
        on_restart: Callable[[str, str], None],
    ) -> None:
        """`replace` starts another, and returns once it does all that the worker did; `on_death` is
        called before. `on_restart` is told the worker's name, what happened to it, and the `remedy`
        in a sentence of its own."""
        self.name = worker.name
        self._worker = worker
        self._replace = replace
        self._on_death = on_death
        self._deaths = Deaths(worker.name, limits=limits)
        self._make_pulse = make_pulse
        self._pulse = make_pulse()
        self._remedy = remedy
        self._on_restart = on_restart

    async def run(self) -> NoReturn:
        """Replace it as often as it dies. Ends only by cancellation, or raises GivenUp."""
        while True:
            error = await self._death()
            self._on_death()
            self._worker = await self._replaced(error)
            self._pulse = self._make_pulse()

    def heard(self, progress: Progress) -> None:
        """The worker tells what it does."""
        self._pulse.heard(work=progress.work, waits=progress.waits)

    async def _death(self) -> Exception:
        worker = self._worker
        while not worker.dead.done():
            await asyncio.wait({worker.dead}, timeout=CHECK_S)
            still_s = self._pulse.hung_s(is_asked=worker.num_pulsed > 0)
            if still_s is not None:
                await worker.give_up(
                    f"made no progress for {still_s:.0f} s (supervision.hang_timeout_s)"
                )
        return worker.dead.result()

    async def _replaced(self, error: Exception) -> Worker:
        while True:
            delay_s = self._deaths.note(error)
            self._on_restart(self.name, f"{error} {self._remedy}")
            await asyncio.sleep(delay_s)
            try:
                return await self._replace()
            except RunFailed:  # which no retry mends
                raise
            except (MillraceError, OSError) as failure:
                error = failure
