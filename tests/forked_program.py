"""Scripts of tests as processes that talk over stdin and stdout, forked from the fork server.

A process of its own that imports torch costs seconds of CPU time; a fork costs milliseconds. Where
the fork server cannot run, the script is started directly.

Run as a module, `-m forked_program SOCKET SCRIPT ARGUMENTS`, it becomes the script.
"""

import asyncio
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from forked_workers import start_fork_server

from millrace.cluster.fork_server import ForkServer, shared_fork_server

CONNECT_TIMEOUT_S = 60.0


class ForkedProgram:
    """As the subprocess.Popen of a child of this process."""

    def __init__(self, pid: int, stdin: socket.socket, stdout: socket.socket, *, log: Path) -> None:
        self.pid, self.returncode = pid, None
        with stdin, stdout:  # they close with their files
            self.stdin, self.stdout = stdin.makefile("wb"), stdout.makefile("rb")
        self._log = log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.communicate()

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> None:
        """Wait for its end, and print its stderr."""
        self.stdin.close()
        self.stdout.close()
        self.wait()
        if self._log.exists():
            sys.stderr.write(self._log.read_text())
            self._log.unlink()


def start_program(script: Path, *arguments: str) -> ForkedProgram | subprocess.Popen[bytes]:
    """Requires the fixture `warm_fork_server`, or each call imports torch again."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with shared_fork_server(start=start_fork_server) as server:
        program = _fork(server, [str(script), *arguments], env) if server is not None else None
    if program is not None:
        return program
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )


def _fork(server: ForkServer, command: Sequence[str], env: dict[str, str]) -> ForkedProgram | None:
    address = f"millrace-test-{secrets.token_hex(8)}"
    log = Path(tempfile.gettempdir()) / f"{address}.log"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(f"\0{address}")
        listener.listen()
        listener.settimeout(CONNECT_TIMEOUT_S)
        forking = server.fork([__name__, address, *command], env=env, log=log)
        child = thread.submit(asyncio.run, forking).result()  # a test may have a loop of its own
        if child is None:
            return None
        stdin, stdout = (listener.accept()[0] for _ in range(2))
        return ForkedProgram(child.pid, stdin, stdout, log=log)


def main() -> None:
    address, *command = sys.argv[1:]
    for pipe in (0, 1):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{address}")
            os.dup2(connection.fileno(), pipe)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
