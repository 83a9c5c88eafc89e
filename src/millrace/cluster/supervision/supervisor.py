"""Owns one worker: when it dies, another is started in its place.

Promise: a worker that dies is replaced, after a wait that doubles with each death; one that hangs
is ended, after it has written down where, and replaced alike. One that dies too often ends the run,
with how often, when, and its own last words in one error.

Runs on the controller's event loop.

The workers that are kept, by name: those of a run, or of a server.

Promise: whoever is kept is replaced when it dies or hangs, until that is too often; then run()
raises, and says why. A worker that is killed while it first comes up is started once more, too.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from millrace.cluster.messages import WorkerProgress
from millrace.cluster.supervision.restarts import RestartHistory, RestartLimits
from millrace.cluster.supervision.watchdog import ProgressWatchdog
from millrace.cluster.worker import Worker
from millrace.config.supervision import SupervisionConfig
from millrace.core.errors import MillraceError, RunFailed, WorkerError

CHECK_S = 0.25  # between two looks at a worker's progress


class Keeper:
    def __init__(
        self,
        worker: Worker,
        *,
        replace: Callable[[], Awaitable[Worker]],
        on_death: Callable[[], None],
        limits: RestartLimits,
        make_pulse: Callable[[], ProgressWatchdog],
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
        self._deaths = RestartHistory(worker.name, limits=limits)
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

    def heard(self, progress: WorkerProgress) -> None:
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


STARTED_AGAIN = "It is started again."
Start = Callable[[], Awaitable[Worker]]


class Keepers:
    def __init__(
        self,
        settings: SupervisionConfig,
        *,
        start_timeout_s: float,
        on_restart: Callable[[str, str], None],
    ) -> None:
        """`on_restart` is told a worker's name, what happened to it, and what is done about it."""
        self._limits = RestartLimits(
            max_restarts=settings.max_restarts,
            window_s=settings.window_s,
            backoff_s=settings.backoff_s,
        )
        self._hang_timeout_s = settings.hang_timeout_s
        self._start_timeout_s = start_timeout_s
        self._on_restart = on_restart
        self._keepers: dict[str, Keeper] = {}  # by worker
        self._keeping: asyncio.TaskGroup | None = None  # while run() runs
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of the keepers

    async def first(self, name: str, start: Start) -> Worker:
        """Start it, and again if it is killed meanwhile. What it says itself is for the user, and
        no retry mends it."""
        deaths = RestartHistory(name, limits=self._limits)
        while True:
            try:
                return await start()
            except WorkerError as error:
                if not error.was_killed:
                    raise
                delay_s = deaths.note(error)
                self._on_restart(name, f"{error} {STARTED_AGAIN}")
                await asyncio.sleep(delay_s)

    def keep(
        self,
        worker: Worker,
        *,
        replace: Start,
        on_death: Callable[[], None],
        remedy: str = STARTED_AGAIN,
    ) -> None:
        """From now on, or from when run() is called."""
        self._keepers[worker.name] = Keeper(
            worker,
            replace=replace,
            on_death=on_death,
            limits=self._limits,
            make_pulse=self._make_pulse,
            remedy=remedy,
            on_restart=self._on_restart,
        )
        if self._keeping is not None:
            self._begin(worker.name, self._keeping)

    def drop(self, name: str) -> None:
        """It is kept no longer."""
        del self._keepers[name]
        self._tasks.pop(name).cancel()

    def heard(self, worker: str, progress: WorkerProgress) -> None:
        """A worker tells what it does; some of them are kept by others."""
        if worker in self._keepers:
            self._keepers[worker].heard(progress)

    async def run(self) -> NoReturn:
        """Ends only by cancellation, or raises GivenUp."""
        async with asyncio.TaskGroup() as self._keeping:
            for name in self._keepers:
                self._begin(name, self._keeping)
            await asyncio.Event().wait()
        raise AssertionError("it waits for what never comes")

    def _begin(self, name: str, keeping: asyncio.TaskGroup) -> None:
        self._tasks[name] = keeping.create_task(self._keepers[name].run())

    def _make_pulse(self) -> ProgressWatchdog:
        return ProgressWatchdog(
            timeout_s=self._hang_timeout_s, first_timeout_s=self._start_timeout_s
        )
