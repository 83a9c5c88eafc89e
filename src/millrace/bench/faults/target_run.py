"""The run that faults are injected into: a small model learns to sort three digits. Torch-free.

The task is easy, so two runs that learn the same amount end with almost the same accuracy.

Promise: the run is started as a user would start it, and resumed with --resume. Everything it
writes is in its own folders, including sockets and temporary files. Nothing outlives close().
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from millrace.bench.faults.processes import TargetProcess, processes, workers_of
from millrace.demo.task import make_tasks
from millrace.monitoring.run_dir import RunDir

NUM_DIGITS = (3,)
HELD_OUT = 256


def train_tasks() -> list[dict[str, Any]]:
    return make_tasks(4096, seed=0, num_digits=NUM_DIGITS)


def held_out_tasks() -> list[dict[str, Any]]:
    return make_tasks(HELD_OUT, seed=0, held_out=True, num_digits=NUM_DIGITS)


GROUPS_PER_STEP = 8
MAX_STALENESS = 2
EXIT_S = 60.0  # time for the system to reap a killed process


def settings_of(folder: Path, *, model: Path, steps: int, seed: int) -> dict[str, Any]:
    """Settings of the run. Restarts are hardly limited, since restarting is what is tested."""
    return {
        "run_dir": str(folder / "run"),
        "model": str(model),
        "seed": seed,
        "tasks": {"generator": "millrace.bench.faults.target_run:train_tasks"},
        "evaluate": {"generator": "millrace.bench.faults.target_run:held_out_tasks"},
        "scorers": [{"function": "millrace.demo.task:exact", "timeout_s": 10.0, "retries": 10}],
        "sampling": {"max_new_tokens": 5},
        "rollout": {"group_size": 8, "max_running_groups": 32},
        "buffer": {"max_staleness": MAX_STALENESS, "capacity": 4 * GROUPS_PER_STEP},
        "engine": {"count": 2, "threads": 1, "max_sequences": 64},
        "trainer": {"steps": steps, "groups_per_step": GROUPS_PER_STEP, "threads": 1},
        # Small last steps end near the best accuracy.
        "optimizer": {"learning_rate": 3e-4, "schedule": "linear", "warmup_steps": 5},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": 5, "keep": 2},
        "journal": {"max_bytes": 2**24, "partial_every_s": 0.25},
        "supervision": {"max_restarts": 1000, "hang_timeout_s": 10.0},
        "cluster": {"start_timeout_s": 60.0},
        # One sample of each group.
        "monitoring": {"progress": "lines", "samples_per_step": GROUPS_PER_STEP},
    }


class TargetRun:
    def __init__(self, folder: Path, *, model: Path, steps: int, seed: int) -> None:
        folder.mkdir(parents=True)

        self.steps = steps
        self.run_dir = RunDir(folder / "run")
        self.console = folder / "console.log"
        # Not in the folder: the path of a socket must be short.
        self.temp = Path(tempfile.mkdtemp(prefix="mr-chaos-"))
        self.controllers: list[int] = []  # pids of all controllers so far
        self._config = folder / "run.toml"
        settings = settings_of(folder, model=model, steps=steps, seed=seed)
        self._config.write_text(tomli_w.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0  # of the last start, on the monotonic clock

    def start(self) -> None:
        """Start the run, or resume it after its controller was killed."""
        if self._process is not None:
            self._process.wait(timeout=EXIT_S)
        command = [sys.executable, "-m", "millrace.cli.main", "train", str(self._config)]
        command += ["--resume"] if self.run_dir.exists else []
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "TMPDIR": str(self.temp), "PYTHONUNBUFFERED": "1"},
            )
        self.started_s = time.monotonic()
        self.controllers.append(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    @property
    def last_output(self) -> str:
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-20:])

    def live_processes(self) -> list[TargetProcess]:
        """The controller and its workers that are alive."""
        if self.exit_code is not None:
            return []
        pid, role = self.controllers[-1], "controller"
        command = processes().get(pid)
        if command is None:
            return workers_of(pid)
        return [TargetProcess(pid=pid, role=role, name=role, command=command), *workers_of(pid)]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # its workers exit with it
            self._process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)
