"""`millrace` commands as processes that are forked from the fork server of the tests.

A command that starts workers imports transformers and starts a fork server, which imports torch:
together about 8 s of CPU time. Forked, it has the imports, and so has a child of it that becomes
its fork server.

Run as a module, `-m forked_command SOCKET`, it becomes the command.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forked_workers import Spare, set_standard_files, start_fork_server

from millrace.cluster.fork_server import is_supported, shared_fork_server

CONNECT_TIMEOUT_S = 60.0
TESTS = Path(__file__).parent


def start_command(
    *arguments: str, folder: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`millrace ARGUMENTS`, with pipes for stdout and stderr, in a session of its own.

    Without the fixture `warm_fork_server`, each call imports torch once more."""
    pipe = subprocess.PIPE
    every: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "text": True}
    every |= {"cwd": folder or Path.cwd(), "env": dict(env or os.environ)}
    if is_supported():
        return ForkedCommand(arguments, **every)
    command = [sys.executable, "-m", "millrace.cli.main", *arguments]
    return subprocess.Popen(command, start_new_session=True, **every)


class ForkedCommand(subprocess.Popen[str]):
    """As a subprocess.Popen that was started with these arguments."""

    def _execute_child(self, args: Any, *settings: Any) -> None:
        """Where subprocess.Popen forks and executes. The order of `settings` is Python's."""
        folder, env = settings[4:6]
        stdout, stderr = settings[12], settings[14]
        request = {"arguments": args, "folder": str(folder), "env": env}
        address = f"millrace-test-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
            listener.bind(f"\0{address}")
            listener.listen()
            listener.settimeout(CONNECT_TIMEOUT_S)
            # A test may have a loop of its own.
            self.pid = thread.submit(asyncio.run, _fork(address)).result()
            self._child_created = True
            with listener.accept()[0] as connection:
                socket.send_fds(connection, [json.dumps(request).encode()], [stdout, stderr])
        os.close(stdout)
        os.close(stderr)


async def _fork(address: str) -> int:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    log = Path(tempfile.gettempdir()) / f"{address}.log"
    with shared_fork_server(start=start_fork_server) as server:
        assert server is not None
        child = await server.fork([__name__, address], env=env, log=log)
    assert child is not None, "the server cannot fork"
    log.unlink()
    return child.pid


def main() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{sys.argv[1]}")
        message, pipes, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    request = json.loads(message)
    for source, target in zip(pipes, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    set_standard_files()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # TMPDIR has another value now
    own = (str(TESTS), str(TESTS.parent / "benchmarks"))
    paths = [path for path in sys.path if path != str(TESTS.parent) and not path.startswith(own)]
    sys.path[:] = [request["folder"], *paths]
    sys.argv = ["millrace", *request["arguments"]]
    spare = Spare([])  # before there are threads
    with shared_fork_server(start=lambda *_, **__: spare):  # the server of the command
        from millrace.cli.main import main as run

        sys.exit(run())


if __name__ == "__main__":
    main()
