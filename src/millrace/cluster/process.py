"""Workers as child processes: each in a session of its own, logged to a file, reaped with its
children, and forked from the fork server where it can run. This holds for the controller's host and
for hosts that join alike.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.address import ClientKeys, Credentials
from millrace.cluster.fork_server import ForkedChild, ForkServer
from millrace.cluster.launchers.launcher import Launcher, ProcessExit, WorkerProcess, WorkerSpec
from millrace.cluster.link import END_SIGNAL
from millrace.cluster.parent_death import with_parent_death_signal
from millrace.core.secrets import without_secrets

LOG_TAIL_BYTES = 4000
DUMP_S = 1.0  # to write the stacks of all threads


class Process(WorkerProcess):
    """A worker of this host. Used on the event loop."""

    def __init__(self, child: asyncio.subprocess.Process | ForkedChild, *, log: Path) -> None:
        self.pid, self._log = child.pid, log.absolute()
        self.log, self._child = self._log, child
        self._stacks = ""  # the outcome of dump_stacks()

    async def exited(self) -> ProcessExit:
        code = await self._child.wait()
        self._signal_session(signal.SIGKILL)
        reason = self._stacks or f"{describe_exit(code)}; its log is {self._log}"
        return ProcessExit(reason=reason, log_tail=self.log_tail(), code=code)

    def terminate(self) -> None:
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(END_SIGNAL)

    def kill(self) -> None:
        if self._child.returncode is None:
            self._signal_session(signal.SIGKILL)

    async def dump_stacks(self) -> tuple[str, str]:
        if self.is_stopped:
            outcome = "it is stopped (SIGSTOP), so its stacks are not in its log"
        else:
            size = self._log_bytes()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGUSR1)
            await asyncio.sleep(DUMP_S)
            has_written = self._log_bytes() > size
            outcome = "its stacks are in its log" if has_written else "it did not write its stacks"
        self._stacks = f"{outcome}, {self._log}"
        return self._stacks, self.log_tail()

    @property
    def is_stopped(self) -> bool:
        try:
            status = Path(f"/proc/{self._child.pid}/stat").read_text()
        except OSError:  # it has ended, or this is not Linux
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def log_tail(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log_bytes() - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError as error:  # a user has deleted it, and the worker has to end all the same
            return f"its log cannot be read: {error}"

    def _log_bytes(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    def _signal_session(self, number: signal.Signals) -> None:
        # macOS raises PermissionError for a group that consists of a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


def available_cores() -> int:
    """Cores that this process may use; containers and taskset often allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_shares(count: int) -> list[set[int]]:
    """Disjoint shares of the available cores, of equal size, in which the hyperthreads of a core
    are together; with fewer cores than shares, each share is all of them."""
    available = os.sched_getaffinity(0)
    cores = sorted(available, key=_first_sibling)
    size = len(cores) // count
    return [set(cores[n * size : (n + 1) * size]) or available for n in range(count)]


def _first_sibling(cpu: int) -> tuple[int, int]:
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        siblings = [int(number) for number in re.findall(r"\d+", file.read_text())]
    except OSError:  # not every virtual machine says it
        siblings = []
    return min(siblings, default=cpu), cpu


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    is_named = -code in {*signal.Signals}  # most real-time signals are not
    return f"was killed by {signal.Signals(-code).name if is_named else f'signal {-code}'}"


@dataclass(kw_only=True, eq=False)
class LocalLauncher(Launcher):
    """Starts workers on this host, which is not shared out. Whoever uses it ends each worker."""

    address: str  # of the hub
    keys: ClientKeys | None
    log_dir: Path
    fork_server: ForkServer | None = None  # forks the workers that it can
    heartbeat_timeout_s: float | None = None  # None on the host of the hub
    folder: Path | None = None  # where workers run that are not forked; None = here

    async def start(self, spec: WorkerSpec) -> Process:
        """Start `python -m module` as a worker of the hub."""
        arguments = [spec.module, "--name", spec.name, "--address", self.address]
        arguments += ["--parent", str(os.getpid())]
        if self.heartbeat_timeout_s is not None:
            arguments += ["--heartbeat-timeout", str(self.heartbeat_timeout_s)]
        # A worker must find the modules that its parent finds, such as those beside the script.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        own = dict(os.environ) if spec.has_secrets else without_secrets(os.environ)
        credentials = Credentials(token=spec.token, keys=self.keys).to_environment()
        env = {**own, "PYTHONPATH": path, **spec.env, **credentials}
        log = self.log_dir / f"{spec.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.fork_server is not None:
            child = await self.fork_server.fork(arguments, env=env, log=log)
            if child is not None:
                return Process(child, log=log)
        with log.open("ab") as file:
            child = await asyncio.create_subprocess_exec(
                *with_parent_death_signal([sys.executable, "-m", *arguments]),
                env=env,
                cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # Its own session: Ctrl-C in a terminal reaches the controller only, and kill()
                # reaches the processes that the worker has started.
                start_new_session=True,
            )
        return Process(child, log=log)
