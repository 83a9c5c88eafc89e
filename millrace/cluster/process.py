"""One child process: started in its own session, logged to a file, reaped, and swept up after."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG_TAIL_BYTES = 4000


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

    def terminate(self) -> None:
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()

    def kill(self) -> None:
        """Kill it and everything it started."""
        if self._child.returncode is None:
            self._signal_session(signal.SIGKILL)

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
