"""Workers of pytest-xdist, forked from one server that has imported the tests.

Importing them costs a worker about 20 s of CPU time, and twice that in a new environment, where
all workers compile the same modules at once.

xdist starts a Python for each worker and talks to it over its stdin and stdout. Here
`python forked_workers.py SOCKET ...` stands in for this Python: it passes its pipes to the server
and ends with the worker. If the server has ended, it becomes the Python that xdist asked for.

Each worker has a child that becomes Millrace's fork server, and one that is the fork server of
multiprocessing, so that neither imports torch again.
"""

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

SERVE = "--serve"
END_TIMEOUT_S = 15.0
# Libraries that start threads when they are imported, of which a fork copies none.
WITHOUT_THREADS = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator
    "OPENBLAS_NUM_THREADS": "1",  # numpy
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerServer:
    """The server, as the process that runs xdist sees it."""

    def __init__(self, folder: str, *, collect: Sequence[str]) -> None:
        """`folder`: where its socket is. `collect`: arguments of pytest, the tests."""
        import subprocess

        from millrace.cluster.fork_server import TITLE_BYTES
        from millrace.cluster.parent_death import with_parent_death_signal

        self._path = f"{folder}/workers"
        self.python = f"{sys.executable} -I -S {__file__} {self._path}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            serve = [sys.executable, __file__, SERVE, str(listener.fileno())]
            self._process = subprocess.Popen(
                with_parent_death_signal([*serve, *collect, " " * TITLE_BYTES]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        """Wait until all workers have ended."""
        import subprocess

        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._path)
            self._process.wait(END_TIMEOUT_S)
        except (ConnectionError, subprocess.TimeoutExpired):
            self._process.kill()  # which kills the workers
            self._process.wait()


def serve(descriptor: int, collect: Sequence[str]) -> None:
    """Collect the tests, and then fork a worker for each connection until one sends nothing."""
    import pytest

    before = dict(os.environ)
    os.environ.update(WITHOUT_THREADS)
    pytest.main(["--collect-only", "-p", "no:cacheprovider", *collect])
    for name in WITHOUT_THREADS.keys() - before.keys():
        del os.environ[name]
    gc.collect()
    gc.freeze()  # or the collector of each fork would copy all pages
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        sys.exit("An import has started a thread, so workers of pytest-xdist are not forked.")
    listener, server = socket.socket(fileno=descriptor), os.getpid()
    while True:
        connection, _ = listener.accept()
        with connection:
            message, pipes, _, _ = socket.recv_fds(connection, 16, 3)
            if not message:
                break
            if os.fork() == 0:
                listener.close()
                run_worker(connection, pipes, server=server)
            for pipe in pipes:
                os.close(pipe)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass  # all have ended


class Spare:
    """A child of a worker with the worker's imports; as the subprocess.Popen of a fork server."""

    def __init__(self, not_its: Sequence[int]) -> None:
        """`not_its`: descriptors of the worker alone."""
        requests, replies, worker = os.pipe(), os.pipe(), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor, target in ((requests[0], 0), (replies[1], 1)):
                os.dup2(descriptor, target)
            for descriptor in (*requests, *replies, *not_its):
                os.close(descriptor)
            become_fork_server(worker)
        os.close(requests[0])
        os.close(replies[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb")
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        import signal

        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


spares: list[Spare] = []  # of this worker: one, until a fork server is needed


def start_fork_server(*arguments: Any, **settings: Any) -> Any:
    """The spare if there is one; otherwise as subprocess.Popen."""
    import subprocess

    return spares.pop() if spares else subprocess.Popen(*arguments, **settings)


def set_standard_files() -> None:
    """Leave those that pytest captured, and use the descriptors as they are now."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    for reference in logging._handlerList:  # libraries made theirs when they were imported
        handler = reference()
        if type(handler) is logging.StreamHandler:
            vars(handler).pop("flush", None)  # transformers sets that of the stream
            handler.stream = sys.stderr


def become_fork_server(worker: int) -> None:
    from millrace.cluster import fork_server
    from millrace.cluster.parent_death import set_parent_death_signal

    set_parent_death_signal(worker)
    os.setsid()
    own = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - with tests/ and benchmarks/
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith((f"{own}/tests/", f"{own}/benchmarks/")) and name != __name__:
            del sys.modules[name]  # a user's module may have this name
    gc.collect()
    set_standard_files()
    fork_server.main()
    os._exit(0)


def fork_multiprocessing_server(not_its: Sequence[int]) -> None:
    """As multiprocessing.forkserver.ensure_running(), but with the imports of this process."""
    from multiprocessing import connection, forkserver, resource_tracker

    resource_tracker.ensure_running()
    server: Any = forkserver._forkserver
    address, (reader, writer) = connection.arbitrary_address("AF_UNIX"), os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            for descriptor in (writer, *not_its):
                os.close(descriptor)
            set_standard_files()
            try:
                forkserver.main(listener.fileno(), reader, [])
            finally:
                os._exit(0)
    os.close(reader)
    server._forkserver_address, server._forkserver_alive_fd = address, writer
    server._forkserver_pid = pid


def run_worker(connection: socket.socket, pipes: Sequence[int], *, server: int) -> None:
    import atexit
    import threading
    import types

    import numpy as np

    from millrace.cluster.parent_death import set_parent_death_signal

    set_parent_death_signal(server)
    alive = connection.detach()  # closes when this process ends
    sys.modules["forked_workers"].spares.append(Spare([*pipes, alive]))
    fork_multiprocessing_server([*pipes, alive])
    for source, target in zip(pipes, range(3), strict=True):
        os.dup2(source, target)
        os.close(source)
    set_standard_files()
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    np.random.seed()  # or all workers would draw the same numbers
    os.write(alive, b"1")
    exec(eval(sys.stdin.readline()), main.__dict__)  # as `python -c` would have done
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(0)  # destroying all modules would copy their pages


def become_worker() -> None:
    """Run as a program: have the server fork a worker with the pipes of this process."""
    path, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
        socket.send_fds(server, [b"worker"], [0, 1, 2])
        is_forked = server.recv(1) == b"1"
    except ConnectionError:
        is_forked = False
    if not is_forked:
        os.execv(sys.executable, [sys.executable, *arguments])
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in (0, 1):  # or xdist would not notice that the worker has died
        os.dup2(nothing, pipe)
    server.recv(1)  # returns when the worker has ended


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        serve(int(sys.argv[2]), sys.argv[3:-1])
    else:
        become_worker()
