"""Adds engines while the trainer waits for batches, and removes them while batches wait for it.

Promise: the number of engines stays between engine.count and engine.max_count; engines that join
are not touched. Every change is reported with its reason. An engine that cannot be added ends the
growth, not the run.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from millrace.controller.controller import Controller
from millrace.core.errors import MillraceError
from millrace.run.workers import RunWorkers

Load = Literal["trainer waits", "batches wait", "balanced"]

SAMPLE_S = 0.25
WINDOW_S = 30.0  # between two decisions; an engine needs some of it to start
WAITING_SHARE = 0.3  # of the window in which the trainer waits, for one more engine
SURPLUS_SHARE = 0.9  # of the window in which a whole batch waits, for one engine fewer


def change(window: list[Load]) -> int:
    """Engines to add after a window of samples; negative = remove."""
    if window.count("trainer waits") > WAITING_SHARE * len(window):
        return 1
    return -1 if window.count("batches wait") > SURPLUS_SHARE * len(window) else 0


async def autoscale(
    workers: RunWorkers, controller: Controller, *, report: Callable[[str], None]
) -> None:
    """Scale the engines of a run until cancelled, if engine.max_count is set."""
    config = controller.config

    def load() -> Load:
        if controller.state.awaits_batch:
            return "trainer waits"
        has_batch = controller.dispatcher.buffer.depth >= config.trainer.groups_per_step
        return "batches wait" if has_batch else "balanced"

    if config.engine.max_count is not None:
        await follow_load(workers, load, max_engines=config.engine.max_count, report=report)


async def follow_load(
    workers: RunWorkers,
    load: Callable[[], Load],
    *,
    max_engines: int,
    report: Callable[[str], None],
    window_s: float = WINDOW_S,
) -> None:
    """Scale until cancelled."""
    added: list[str] = []
    while True:
        window: list[Load] = []
        for _ in range(max(1, round(window_s / SAMPLE_S))):
            await asyncio.sleep(min(SAMPLE_S, window_s))
            window.append(load())
        wanted, names = change(window), workers.engine_names
        added = [name for name in added if name in names]  # `millrace engines` may remove some
        if wanted > 0 and len(names) < max_engines:
            share = window.count("trainer waits") / len(window)
            report(f"The trainer waited for {share:.0%} of {window_s:g} s: adding an engine.")
            try:
                added.append(await workers.add_engine())
            except (MillraceError, OSError) as error:
                max_engines = len(workers.engine_names)
                report(f"No engine could be added, so {max_engines} remain: {error}")
        elif wanted < 0 and added:
            report(f"Whole batches waited for the trainer: removing {added[-1]}.")
            await workers.remove_engine(added.pop())
