"""One child process: started in its own session, logged to a file, reaped, and swept up after.

How a worker's process is started is said once, for this host and for hosts that join.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.credentials import Credentials
from millrace.cluster.leash import leashed

LOG_TAIL_BYTES = 4000
DUMP_S = 1.0  # to write the stacks of all threads


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """How a process ended."""

    reason: str  # goes on from "Worker 'engine-0' ..."
    account: str = ""  # its own: the end of its log
    may_have_spoken: bool = False  # messages of its last moments may still be under way
    was_killed: bool = False  # by a signal


class Process:
    """Made by start(). Used on the event loop."""

    def __init__(self, child: asyncio.subprocess.Process, *, log: Path) -> None:
        self.pid = child.pid
        self.log = log
        self._child = child

    @classmethod
    async def start(cls, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> "Process":
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            child = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # Its own session: a terminal's Ctrl-C reaches the controller only, and kill()
                # reaches whatever the worker itself has started.
                start_new_session=True,
            )
        return cls(child, log=log)

    async def wait(self) -> int:
        """Exit code; negative: the signal that ended it."""
        code = await self._child.wait()
        self._signal_session(signal.SIGKILL)
        return code

    async def ended(self) -> ProcessExit:
        code = await self.wait()
        reason = f"{describe_exit(code)}; its log is {self.log}"
        return ProcessExit(
            reason=reason,
            account=self.log_tail(),
            may_have_spoken=code >= 0,
            was_killed=code < 0,
        )

    def terminate(self) -> None:
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()

    def kill(self) -> None:
        """Kill it and everything it started."""
        if self._child.returncode is None:
            self._signal_session(signal.SIGKILL)

    async def dump_stacks(self) -> str:
        """Have it write the stacks of its threads to its log; says how that went."""
        if self._is_stopped():
            return "it is stopped (SIGSTOP), so its stacks are not in its log"
        size = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        await asyncio.sleep(DUMP_S)
        if self.log.stat().st_size == size:
            return "it did not write its stacks"
        return "its stacks are in its log"

    async def last_words(self) -> tuple[str, str]:
        """Of one that hangs: how it went with its stacks, and the end of its log."""
        told = await self.dump_stacks()
        return f"{told}, {self.log.absolute()}", self.log_tail()

    def _is_stopped(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # it is gone, or this is no Linux
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def log_tail(self) -> str:
        """The last lines it wrote."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def _signal_session(self, number: signal.Signals) -> None:
        # PermissionError: macOS says so of a group that has only a zombie left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


async def start_worker(
    name: str,
    module: str,
    *,
    address: str,
    credentials: Credentials,
    log: Path,
    env: Mapping[str, str] | None = None,
    heartbeat_timeout_s: float | None = None,
) -> Process:
    """Start `python -m module` as the worker `name` of the hub at `address`."""
    command = [sys.executable, "-m", module, "--name", name, "--address", address]
    command += ["--parent", str(os.getpid())]
    if heartbeat_timeout_s is not None:
        command += ["--heartbeat-timeout", str(heartbeat_timeout_s)]
    # A worker must find what its parent finds, such as modules beside the user's script.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    inherited = {**os.environ, "PYTHONPATH": path, **(env or {})}
    env = {**inherited, **credentials.to_environment()}
    # Before it imports anything: it may be stopped there, and its controller killed.
    return await Process.start(leashed(command), env=env, log=log)
