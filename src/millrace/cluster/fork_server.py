"""A fork server: it imports slow modules once and forks workers, on Linux.

Importing torch and transformers takes seconds at each start of a worker; a fork takes milliseconds.

Promise: a forked worker is a child of its parent, the controller or `millrace join`, like one that
was started directly: exit status, signals, parent death and command line are the same, and it
survives the server. The server forks twice, and the process in between exits at once: the kernel
gives the orphan to the nearest subreaper, which the parent is for that moment.

The server creates no thread and does not initialise CUDA, so forking is safe; if an import does,
the server ends and workers are started directly. The parent's side runs on its event loop; this
module, run as a program, is the server. Hubs share a server, whose imports overlap with other work
if it starts early.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.cluster.parent_death import set_parent_death_signal, with_parent_death_signal
from millrace.core.secrets import is_secret, without_secrets

# What workers import; the server does it for them.
PRELOAD = (
    "torch",
    "transformers",
    "millrace.inference.worker",
    "millrace.training.worker",
    "millrace.scoring.functions.worker",
    "millrace.scoring.reward_models.worker",
    "millrace.scoring.teachers.worker",
)
LOG_NAME = "fork_server.log"  # beside the logs of workers, if the server cannot fork them
TITLE_BYTES = 2048  # room for the command line of a worker
# Variables that no import reads: workers may differ in them. (pytest sets its own for each phase.)
LATE_VARIABLES = ("CUDA_MPS_", "CUDA_VISIBLE_DEVICES", "MILLRACE_HUB_", "PYTEST_", "PYTHONPATH")
# torch.cuda.is_available() asks NVML then: an initialised CUDA driver does not survive a fork.
SERVER_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
CUDA_DRIVER, CUDA_ERROR_NOT_INITIALIZED = "libcuda.so.1", 3
PR_SET_CHILD_SUBREAPER = 36
READY = b"ready\n"


def is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class ForkedChild:
    """A child of this process that the fork server made; as asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = asyncio.create_task(self._reap(), name=f"reap-{pid}")

    async def wait(self) -> int:
        return await asyncio.shield(self._reaping)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    async def _reap(self) -> int:
        loop, exited, pidfd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self.pid)
        loop.add_reader(pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 - it has ended
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The parent's side."""

    def __init__(self, preload: Sequence[str], *, start: Any = subprocess.Popen) -> None:
        """`preload`: names of the modules to import. `start`: starts the server's process."""
        self._env = without_secrets(os.environ)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - its stderr; closed in close()
        command = [sys.executable, "-m", __name__, " " * TITLE_BYTES]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        self._process = start(
            with_parent_death_signal(command),
            env={**self._env, **SERVER_ENV, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.num_users, self._is_ready = 0, False
        self._lock = threading.Lock()  # one request at a time
        self._send(list(preload))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def fork(
        self, arguments: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> ForkedChild | None:
        """Fork a worker `python -m ARGUMENTS`; None if it must be started directly."""
        # Whether modules that were imported in the server's environment fit this one.
        different = {name for name in {*self._env, *env} if self._env.get(name) != env.get(name)}
        if not all(name.startswith(LATE_VARIABLES) or is_secret(name) for name in different):
            return None
        request = {
            "arguments": list(arguments),
            "env": dict(env),
            "folder": str(Path.cwd()),
            "log": str(log.absolute()),  # noqa: ASYNC240 - reads no disk
            "parent": os.getpid(),
        }
        lock, made, is_cancelled = threading.Lock(), list[int](), threading.Event()

        def ask() -> int:
            pid = self._ask(request)
            with lock:
                made.append(pid)
                if is_cancelled.is_set():
                    _end(pid)
            return pid

        try:
            pid = await asyncio.to_thread(ask)
        except asyncio.CancelledError:
            # The event loop may be closed before the thread ends, so the thread ends the worker.
            with lock:
                is_cancelled.set()
                for pid in made:
                    _end(pid)
            raise
        return ForkedChild(pid) if pid else None

    def close(self) -> None:
        """End the server; its workers live on."""
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _ask(self, request: Mapping[str, Any]) -> int:
        """The process id of the new worker; 0 if the server cannot fork one."""
        with self._lock:
            if not self._is_ready:
                self._is_ready = self._stdout.readline() == READY
            if not self._is_ready:
                self._errors.seek(0)
                Path(request["log"]).with_name(LOG_NAME).write_bytes(self._errors.read())
                return 0
            with _SUBREAPER:
                _set_subreaper(True)
                try:
                    self._send(request)
                    pid = int(self._stdout.readline().strip() or 0)
                finally:
                    _set_subreaper(False)
        if pid < 0:  # it could not become a worker, and exits
            os.waitpid(-pid, 0)
        return max(0, pid)

    def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # then there is no reply, either
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()


_SERVERS: dict[tuple[str, ...], ForkServer] = {}  # of this process, the workers' parent, by imports
_SERVERS_LOCK = threading.Lock()


@contextlib.contextmanager
def shared_fork_server(
    preload: Sequence[str] = PRELOAD, *, start: Any = subprocess.Popen
) -> Iterator[ForkServer | None]:
    """The server with these imports; it ends with its last user. None where it cannot run."""
    if not preload or not is_supported():
        yield None
        return
    key = tuple(preload)
    with _SERVERS_LOCK:
        server = _SERVERS.get(key)
        if server is None or not server.is_alive:
            server = _SERVERS[key] = ForkServer(key, start=start)
        server.num_users += 1
    try:
        yield server
    finally:
        with _SERVERS_LOCK:
            server.num_users -= 1
            if server.num_users == 0:
                server.close()


def _end(pid: int) -> None:
    """Kill and reap a worker whose launch was cancelled; 0 = none was made."""
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


_SUBREAPER = threading.Lock()  # held by the one fork in flight: the process has one such setting


def _set_subreaper(is_subreaper: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_subreaper), 0, 0, 0)


# The server


def main() -> None:
    for module in json.loads(sys.stdin.buffer.readline()):
        importlib.import_module(module)
        # A worker module is run as __main__ later; only its imports are of use here.
        if module.endswith(".worker"):
            del sys.modules[module]
    if _cuda_is_initialized():
        sys.exit("An import has initialised CUDA, so workers are not forked.")
    gc.collect()
    gc.freeze()  # or the collector of each worker would copy all pages
    os.write(1, READY)
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            os.close(reader)
            _become_worker(request, middle=middle, writer=writer)
            sys.argv = request["arguments"]
            try:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                end_process(end.code)
            end_process(None)
        os.close(writer)
        os.waitpid(middle, 0)
        os.write(1, os.read(reader, 32) + b"\n")
        os.close(reader)


def _cuda_is_initialized() -> bool:
    """Whether this process has called cuInit(). Importing torch only loads the driver."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # it is not loaded
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED


def _become_worker(request: dict[str, Any], *, middle: int, writer: int) -> None:
    """In the new process: take the place of a worker that was started directly."""
    try:
        while os.getppid() == middle:
            time.sleep(0.0005)
        set_parent_death_signal(request["parent"])  # exits unless that is the parent now
        os.setsid()
        os.chdir(request["folder"])
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(nothing)
        os.environ.clear()
        os.environ.update(request["env"])
        path = request["env"]["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [request["folder"], *path]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # or all workers would draw the same numbers
        _set_command_line([sys.executable, "-m", *request["arguments"]])
        os.write(writer, str(os.getpid()).encode())
        os.close(writer)
    except BaseException:  # noqa: BLE001 - the parent starts a worker directly
        traceback.print_exc()
        os.write(writer, str(-os.getpid()).encode())
        os._exit(1)


def end_process(status: object) -> None:
    """End this process as multiprocessing does. Destroying all imported modules would take a
    second, in a worker because the first write to each page of the server copies it."""
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status or 0)


def _set_command_line(command: list[str]) -> None:
    """Overwrite the arguments in memory, which /proc/PID/cmdline and ps read."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    line = b"\0".join(os.fsencode(each) for each in command)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


if __name__ == "__main__":
    main()
