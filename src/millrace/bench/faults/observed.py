"""A target run from start to end, with a checker and a fault injector."""

import json
import time
from pathlib import Path

from millrace.bench.faults.checker import RunChecker
from millrace.bench.faults.injector import FaultInjector
from millrace.bench.faults.promises import check_leftovers
from millrace.bench.faults.target_run import TargetRun


class ObservedRun:
    def __init__(self, folder: Path, *, model: Path, steps: int, seed: int) -> None:
        self._seed = seed
        self.target = TargetRun(folder, model=model, steps=steps, seed=seed)
        self.checker = RunChecker(self.target.run_dir)
        self.injector = FaultInjector(self.target, self.checker)

    def run(self, num_kills: int = 0, *, step_s: float = 0.0) -> None:
        self.began_s = time.monotonic()
        try:
            self.target.start()
            self.injector.inject(num_kills, step_s=step_s, seed=self._seed)
            self.ended_s = time.monotonic()
            self.checker.conclude()
            self.leftovers = check_leftovers(self.target)
        finally:
            self.target.close()
        self.summary = json.loads(self.target.run_dir.summary.read_text())
