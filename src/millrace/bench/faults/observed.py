"""A run from its first start to its end, with a witness, and a monkey that kills its processes."""

import json
import time
from pathlib import Path

from millrace.bench.faults.checker import RunChecker
from millrace.bench.faults.injector import FaultInjector
from millrace.bench.faults.promises import check_leftovers
from millrace.bench.faults.subject import Subject


class ObservedRun:
    def __init__(self, folder: Path, *, model: Path, steps: int, seed: int) -> None:
        self._seed = seed
        self.subject = Subject(folder, model=model, steps=steps, seed=seed)
        self.witness = RunChecker(self.subject.run_dir)
        self.monkey = FaultInjector(self.subject, self.witness)

    def run(self, num_kills: int = 0, *, step_s: float = 0.0) -> None:
        self.began_s = time.monotonic()
        try:
            self.subject.start()
            self.monkey.torment(num_kills, step_s=step_s, seed=self._seed)
            self.ended_s = time.monotonic()
            self.witness.conclude()
            self.leftovers = check_leftovers(self.subject)
        finally:
            self.subject.close()
        self.summary = json.loads(self.subject.run_dir.summary.read_text())
