"""The run that faults are injected into, its processes and its checker. Torch-free.

A small model learns to sort three digits. The task is easy, so two runs that learn the same amount
end with almost the same accuracy.

Promise: the run is started as a user would start it, and resumed with --resume. Everything it
writes is in its own folders, including sockets and temporary files. Nothing outlives close().
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from millrace.core.files import FileTail
from millrace.demo.task import make_tasks
from millrace.monitoring.run_dir import RunDir, read_step

SETTINGS = Path(__file__).with_name("target_run.toml")
NUM_DIGITS = (3,)
HELD_OUT = 256
GROUPS_PER_STEP, MAX_STALENESS = 8, 2  # as in the settings
EXIT_S = 60.0  # time for the system to reap a killed process
_WORKER = re.compile(r"-m (millrace(?:\.\w+)*)\.worker .*--name (\S+) .*--parent (\d+)")
_ROLES = {
    "millrace.inference": "engine",
    "millrace.training": "trainer",
    "millrace.scoring.functions": "scorer",
}
POLL_S = 0.05


def train_tasks() -> list[dict[str, Any]]:
    return make_tasks(4096, seed=0, num_digits=NUM_DIGITS)


def held_out_tasks() -> list[dict[str, Any]]:
    return make_tasks(HELD_OUT, seed=0, held_out=True, num_digits=NUM_DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetProcess:
    pid: int
    role: str  # "engine", "scorer", "trainer", "controller"
    name: str
    command: str


def processes() -> dict[int, str]:
    """Command lines by pid, without zombies."""
    table = subprocess.run(
        ["ps", "-axww", "-o", "pid=,stat=,command="], capture_output=True, text=True, check=True
    )
    rows = (line.split(maxsplit=2) for line in table.stdout.splitlines())
    return {int(row[0]): row[2] for row in rows if len(row) == 3 and not row[1].startswith("Z")}


def workers_of(*controllers: int) -> list[TargetProcess]:
    """Processes whose command line names one of these controllers as their parent."""
    found = ((pid, command, _WORKER.search(command)) for pid, command in processes().items())
    return [
        TargetProcess(pid=pid, role=_ROLES.get(match[1], match[1]), name=match[2], command=command)
        for pid, command, match in found
        if match is not None and int(match[3]) in controllers
    ]


def is_alive(process: TargetProcess) -> bool:
    """Compares the command line, too, since a pid may be reused."""
    return processes().get(process.pid) == process.command


def send_signal(process: TargetProcess, number: signal.Signals) -> bool:
    """False if the process was gone already."""
    with contextlib.suppress(ProcessLookupError):
        if is_alive(process):
            os.kill(process.pid, number)
            return True
    return False


def gone_after_s(process: TargetProcess, *, timeout_s: float) -> float | None:
    """Seconds until the process has left the table; None = it is still there."""
    start_s = time.monotonic()
    while is_alive(process):
        if time.monotonic() - start_s > timeout_s:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - start_s


class TargetRun:
    def __init__(self, folder: Path, *, model: Path, steps: int, seed: int) -> None:
        folder.mkdir(parents=True)
        self.steps, self.seed = steps, seed
        self.run_dir = RunDir(folder / "run")
        self.console = folder / "console.log"
        # Not in the folder: the path of a socket must be short.
        self.temp = Path(tempfile.mkdtemp(prefix="mr-chaos-"))
        self.controllers: list[int] = []  # pids of all controllers so far
        self._config = folder / "run.toml"
        settings = tomllib.loads(SETTINGS.read_text())
        settings["trainer"]["steps"] = steps
        own = {"run_dir": str(self.run_dir.path), "model": str(model), "seed": seed}
        self._config.write_text(tomli_w.dumps({**settings, **own}))
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

    def live_processes(self) -> list[TargetProcess]:
        """The controller and its workers that are alive."""
        if self.exit_code is not None:
            return []
        pid, role = self.controllers[-1], "controller"
        command = processes().get(pid, "")
        return [TargetProcess(pid=pid, role=role, name=role, command=command), *workers_of(pid)]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # its workers exit with it
            self._process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    at_s: float  # on the monotonic clock
    step: int
    is_new: bool  # False = repeated after a restart


class RunChecker:
    """Watches a run from outside: when each step was done, and with which groups. It reads
    metrics.jsonl and one episode of each group in rollouts/. The journal writes neither, so the
    checker can contradict it. Called from one thread, from time to time."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._rows = FileTail(run_dir.metrics)
        self.step = 0  # the last step that was ever completed
        self.steps_seen: list[StepSeen] = []
        self.began_s = self.ended_s = time.monotonic()  # of the run
        self.groups: dict[int, frozenset[int]] = {}  # by step
        self.contradictions: list[str] = []

    def look(self) -> None:
        """Read what the run has written since the last call."""
        are_kept = self._rows.has_restarted()  # a resumed run rewrites the rows that it keeps
        now_s = time.monotonic()
        for line in b"\n".join(self._rows.chunks()).splitlines():
            step = json.loads(line)["step"]
            if step > self.step or not are_kept:
                self.steps_seen.append(StepSeen(at_s=now_s, step=step, is_new=step > self.step))
            self.step = max(self.step, step)
            # A step's episodes are written after its row and before the next row.
            if step > 1:
                self._read_groups(step - 1)

    def conclude(self) -> None:
        self.ended_s = time.monotonic()
        self.look()
        if self.step:
            self._read_groups(self.step)

    def _read_groups(self, step: int) -> None:
        episodes = read_step(self._run_dir.rollouts, step, dict[str, Any])
        if not episodes:  # killed right after the row and, in another thread, a checkpoint
            return
        numbers = frozenset(episode["group"] for episode in episodes)
        before = self.groups.setdefault(step, numbers)
        if before != numbers:
            self.contradictions.append(
                f"Step {step} trained on groups {sorted(before)}, and when it was repeated on"
                f" groups {sorted(numbers)}."
            )
