"""Another host, as far as one machine can play it: a process with its own folder, its own
environment, and nothing of the run but the ticket."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from millrace.cluster.fork_server import TITLE_BYTES
from millrace.cluster.hub import Hub
from millrace.cluster.join.ticket import ticket_file
from millrace.cluster.launchers.hosts import JoinLauncher
from millrace.cluster.launchers.launcher import NO_NEEDS, Resources
from millrace.cluster.worker import Worker

HERE = Path(__file__).parent


def outside_address() -> str:
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no network interface but loopback")


def is_forked(pid: int | None) -> bool:
    """The command line of a forked worker is written over the longer one of its server."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0" * (TITLE_BYTES // 2))


def write_ticket(hub: Hub, path: Path) -> Path:
    """The ticket of a hub, as if copied: it stays when the run is over."""
    with ticket_file(hub.ticket(), path):
        copy = path.with_name(f"copy-of-{path.name}")
        copy.unlink(missing_ok=True)
        copy.touch(mode=0o600)
        copy.write_bytes(path.read_bytes())
    return copy


def expect(
    hub: Hub, name: str, *, timeout_s: float = 30, needs: Resources = NO_NEEDS
) -> asyncio.Task[Worker]:
    """Wait for a host that brings this worker."""
    launcher = JoinLauncher(hub.registry, role="engine", timeout_s=timeout_s, needs=needs)
    return asyncio.create_task(hub.launch(name, "", launcher=launcher))


class Host:
    """`join` as a process of its own; by default it brings echo workers."""

    def __init__(self, process: asyncio.subprocess.Process, *, folder: Path) -> None:
        self.process = process
        self.folder = folder

    @classmethod
    async def start(cls, *arguments: str | Path, folder: Path, script: str = "join_echo") -> "Host":
        folder.mkdir()  # noqa: ASYNC240
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", script, *map(str, arguments)),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"},
        )
        return cls(process, folder=folder)

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, by name."""
        children = psutil.Process(self.process.pid).children()
        workers = [child for child in children if "--name" in child.cmdline()]
        return sorted(
            workers, key=lambda child: child.cmdline()[child.cmdline().index("--name") + 1]
        )

    async def finish(self, timeout_s: float = 20) -> tuple[int, str, str]:
        """Exit code and what it printed, once it has ended by itself."""
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, stdout.decode(), stderr.decode()
