"""The interface of the sandbox: code with inputs or tests in, outputs or test results out.

Promise: a call ends within its time limit and leaves no process behind. It raises SandboxError only
if the sandbox itself fails, never for anything the code does. It blocks its thread; several threads
may call at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.scoring.sandbox.frames import frame, frames
from millrace.scoring.sandbox.lockdown import unsupported

ROOT = str(Path(__file__).parents[3])  # where the runner finds this package
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from millrace.scoring.sandbox.runner import main; main()"
)


class SandboxError(Exception):
    """The sandbox could not be set up, so nothing was run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    time_s: float = 5.0  # wall time of the whole call, and CPU time of each process
    memory_bytes: int = 2**29  # address space of each process
    output_bytes: int = 2**20  # output of a program, or return value of a function


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRun:
    output: str
    ok: bool  # exited with status 0 within all limits


def run_programs(
    code: str,
    inputs: Sequence[str],
    *,
    limits: SandboxLimits,
    can_read: bool = True,
    can_thread: bool = True,
) -> list[SandboxRun]:
    """Run the code as a script once per standard input. Runs beyond the time limit have failed."""
    job: dict[str, Any] = {"kind": "programs", "count": len(inputs)}
    job |= {"can_read": can_read, "can_thread": can_thread}
    results = _run(job, list(inputs), code=code, limits=limits)
    runs = [SandboxRun(output=result["output"], ok=result["ok"]) for result in results]
    return runs + [SandboxRun(output="", ok=False)] * (len(inputs) - len(runs))


def run_tests(code: str, tests: Sequence[str], *, limits: SandboxLimits) -> list[bool]:
    """Return for each test whether it passes. The code is loaded once for all tests."""
    job = {"kind": "tests", "can_read": True, "can_thread": True}
    results = _run(job, [list(tests)], code=code, limits=limits)
    passed = [result["ok"] is True for result in results]
    return passed + [False] * (len(tests) - len(passed))


def _run(
    job: dict[str, Any], inputs: list[Any], *, code: str, limits: SandboxLimits
) -> list[dict[str, Any]]:
    """Start a runner, and collect its results until it ends or the time limit is reached."""
    if (reason := unsupported()) is not None:
        raise SandboxError(f"generated code cannot be run: {reason}")
    job |= {
        "code": code,
        "parent": os.getpid(),
        "root": ROOT,
        "cpu_s": max(1, round(limits.time_s + 0.5)),
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", START, ROOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(b"".join(map(frame, [job, *inputs])), limits.time_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
    except BaseException:
        _kill(process)
        process.wait()
        raise
    if process.returncode > 0:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxError(f"the sandbox failed: {reason or process.returncode}")
    return frames(output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the runner, which the code under test cannot leave."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
