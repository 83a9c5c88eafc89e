"""Live worker processes of one controller, from the system's process table."""

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

_WORKER = re.compile(r"-m (millrace(?:\.\w+)*)\.worker .*--name (\S+) .*--parent (\d+)")
_ROLES = {
    "millrace.inference": "engine",
    "millrace.training": "trainer",
    "millrace.scoring.functions": "scorer",
}
POLL_S = 0.05


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
