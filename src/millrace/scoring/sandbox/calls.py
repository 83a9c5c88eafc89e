"""What the rest of Millrace calls: code and its inputs or tests in, outputs or results out.

Promise: a call ends within its time limit, and no process of it is left then. It raises
SandboxError only if the sandbox itself fails, never for anything the code does. Blocks its thread;
several threads may call at once.
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

ROOT = str(Path(__file__).parents[3])  # where the judge finds this package
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from millrace.scoring.sandbox.judge import main; main()"
)


class SandboxError(Exception):
    """The sandbox could not be set up, so nothing was run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    time_s: float = 5.0  # of the whole call; CPU time of each process alike
    memory_bytes: int = 2**29  # address space of each process
    output_bytes: int = 2**20  # that a program prints, or a function returns


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    output: str
    ok: bool  # it ended by itself, with status 0, within all limits


def run_programs(
    code: str, inputs: Sequence[str], *, limits: SandboxLimits, can_read: bool = True
) -> list[Ran]:
    """Run the code as a script once for each standard input. Those that time left no room for have
    failed."""
    order = {"kind": "programs", "count": len(inputs)}
    results = _judge(order, list(inputs), code=code, limits=limits, can_read=can_read)
    ran = [Ran(output=result["output"], ok=result["ok"]) for result in results]
    return ran + [Ran(output="", ok=False)] * (len(inputs) - len(ran))


def run_tests(
    code: str, tests: Sequence[str], *, limits: SandboxLimits, can_read: bool = True
) -> list[bool]:
    """Whether each test passes; the code is loaded once for all of them."""
    results = _judge({"kind": "tests"}, [list(tests)], code=code, limits=limits, can_read=can_read)
    passed = [result["ok"] is True for result in results]
    return passed + [False] * (len(tests) - len(passed))


def _judge(
    order: dict[str, Any], inputs: list[Any], *, code: str, limits: SandboxLimits, can_read: bool
) -> list[dict[str, Any]]:
    """Start a judge, and collect what it says until it ends or time is over."""
    if (reason := unsupported()) is not None:
        raise SandboxError(f"generated code cannot be run: {reason}")
    order |= {
        "code": code,
        "parent": os.getpid(),
        "root": ROOT,
        "cpu_s": max(1, round(limits.time_s + 0.5)),
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "can_read": can_read,
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
        said, complaint = process.communicate(b"".join(map(frame, [order, *inputs])), limits.time_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        said, complaint = process.communicate()
    except BaseException:
        _kill(process)
        process.wait()
        raise
    if process.returncode > 0:
        words = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxError(f"the sandbox failed: {words or process.returncode}")
    return frames(said)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The judge and what it forked share a group, which the code under test cannot leave."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
