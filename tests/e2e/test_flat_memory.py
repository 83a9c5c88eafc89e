"""The memory of the controller does not grow with the length of a run."""

import asyncio
import gc
import sys
import time
from collections import deque
from typing import Any

import psutil
import pytest
from endless_run import EndlessRun
from project import Command, make_project

WARM_UP, STEPS = 210, 330  # bounded windows of the past (200 marks, 1024 lengths) are full by then
NUM_SAMPLES = 8  # at consecutive steps, because the work in flight varies
LAST_SAMPLES = STEPS - 10


class MemoryInspector:
    """Measures all objects that the garbage collector tracks."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes of all objects, by sample
        self.num_tasks: list[int] = []  # of the event loop, by sample
        self._containers: tuple[tuple[Any, int], ...] = ()  # with their lengths

    def remember_containers(self) -> None:
        gc.collect()
        kinds = (list, dict, set, deque)
        self._containers = tuple((c, len(c)) for c in gc.get_objects() if isinstance(c, kinds))

    def sample(self) -> None:
        gc.collect()
        self.sizes.append(sum(sys.getsizeof(one) for one in gc.get_objects()))
        self.num_tasks.append(len(asyncio.all_tasks()))

    def grown(self, by: int) -> list[str]:
        """Return the remembered containers that grew by this many entries, and forget them all.

        Timers do not count, because the event loop removes cancelled ones only when there are many.
        """
        containers, self._containers = self._containers, ()
        return [
            f"{type(one).__name__} {one!r:.80}"
            for one, length in containers
            if len(one) >= length + by
            if not isinstance(next(iter(one)), asyncio.TimerHandle)
        ]


async def test_controller_keeps_no_objects_of_finished_steps(tmp_path):
    inspector, grown = MemoryInspector(), []

    def inspect(step: int) -> None:
        if step == WARM_UP + NUM_SAMPLES:
            inspector.remember_containers()
        if step == LAST_SAMPLES - 1:
            grown.extend(inspector.grown((STEPS - WARM_UP) // 2))
        if 0 <= step - WARM_UP < NUM_SAMPLES or 0 <= step - LAST_SAMPLES < NUM_SAMPLES:
            inspector.sample()

    run = EndlessRun(tmp_path, steps=STEPS, on_step=inspect)
    gc.freeze()  # ignore older objects
    try:
        await run.run()
    finally:
        gc.unfreeze()
    assert len(inspector.sizes) == 2 * NUM_SAMPLES
    assert grown == []
    assert _growth(inspector.num_tasks) < 5
    assert _growth(inspector.sizes) < 40_000, "the two groups of a step take thousands of bytes"


def _growth(samples: list[int]) -> int:
    return min(samples[NUM_SAMPLES:]) - min(samples[:NUM_SAMPLES])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_of_controller_is_flat_over_hundreds_of_steps(tmp_path):
    steps = 600
    project = make_project(
        tmp_path,
        sampling={"max_new_tokens": 4},
        trainer={"steps": steps, "groups_per_step": 2},
        rollout={"group_size": 2},
        checkpoint={"every_steps": 50},
        journal={"max_bytes": 500_000, "partial_every_s": 0.2},
    )
    run = Command("train", "run.toml", folder=project)
    metrics = project / "run" / "metrics.jsonl"
    resident: dict[int, int] = {}  # bytes by step
    while run.process.poll() is None:
        step = metrics.read_text().count("\n") if metrics.exists() else 0
        if step >= steps // 3:
            resident[step] = psutil.Process(run.process.pid).memory_info().rss
        time.sleep(0.1)
    code, _, stderr = run.finish()
    assert code == 0, stderr
    first, second = (
        [rss for step, rss in resident.items() if begin <= step < begin + steps // 6]
        for begin in (steps // 3, 5 * steps // 6)
    )
    assert min(second) < min(first) * 1.02 + 2**20
