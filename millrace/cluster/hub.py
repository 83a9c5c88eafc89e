"""The controller's end of the wire: one socket, and the worker processes behind it.

Promise: a worker that dies fails every call that waits for it, at once and with its own account;
no process, socket or file of the hub outlives it. What is no message of a known worker is counted
and dropped.

Everything here runs on the controller's event loop. Bounds: the socket takes in RECEIVE_MESSAGES
per worker and then lets that worker's sends block. Sending is not bounded by the socket, whose
choice at a full queue would be to drop; it is bounded by the callers, who wait for their replies.
"""

import asyncio
import contextlib
import ipaddress
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from millrace.cluster.link import EVENT_ID, TOKEN_VARIABLE, identity_of, read_frames
from millrace.cluster.messages import Message
from millrace.cluster.wire import Decoder, WireError, encode
from millrace.cluster.worker import Send, Worker
from millrace.core.errors import ConfigError

RECEIVE_MESSAGES = 1000
MAX_SOCKET_PATH = 100  # bytes; the operating system's limit is 104 or 108

OnEvent = Callable[[str, Message], None]


class Hub:
    """Starts workers and carries calls to them; use as an async context manager.

    `on_event(worker, message)` gets what workers say unasked: Hello, Progress, Published, Failed.
    An error in it is treated as a failure of that worker.
    """

    def __init__(
        self,
        runtime_dir: Path | None = None,
        *,
        log_dir: Path,
        on_event: OnEvent,
        address: str = "auto",
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        """The socket lies in a private folder in `runtime_dir`, by default the temp dir."""
        self.refused = 0  # messages from strangers, and what was no message at all
        self.unclaimed = 0  # replies to calls that were given up
        self.address = address if address == "auto" else _loopback(address)
        self._runtime_parent = runtime_dir
        self._log_dir = log_dir
        self._on_event = on_event
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        # By routing id. The dead stay until the next launch.
        self._workers: dict[bytes, Worker] = {}
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="millrace-", dir=self._runtime_parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            if self.address == "auto":
                self.address = _local(folder)
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            self._socket = context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops what it cannot send
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
            self._bind()
            reader = asyncio.create_task(self._read(), name="hub-reader")
            stack.push_async_callback(_cancelled, reader)
            stack.push_async_callback(self._stop_workers)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._exit.aclose()

    async def launch(
        self, name: str, module: str, *, env: Mapping[str, str] | None = None
    ) -> Worker:
        """Start `python -m module` as the worker `name` and wait for its Hello.

        The name may be that of a worker that died.
        """
        token = secrets.token_hex(16)
        identity = identity_of(name, token=token)
        log = self._log_dir / f"{name}.log"
        command = [sys.executable, "-m", module, "--name", name, "--address", self.address]
        worker = Worker(
            name, log=log, send=self._sender(identity), stop_timeout_s=self._stop_timeout_s
        )
        self._workers = {id: other for id, other in self._workers.items() if not other.is_gone}
        self._workers[identity] = worker
        try:
            await worker.start(
                [*command, "--parent", str(os.getpid())],
                env=_environment({**(env or {}), TOKEN_VARIABLE: token}),
                timeout_s=self._start_timeout_s,
            )
        except BaseException:
            worker.kill()
            await worker.is_gone_within(None)
            del self._workers[identity]
            raise
        return worker

    def _bind(self) -> None:
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen at cluster.address = {self.address!r}: {error}; choose another."
            ) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _sender(self, identity: bytes) -> Send:
        async def send(call_id: bytes, message: Message) -> None:
            frames = [identity, call_id, *encode(message)]
            await self._socket.send_multipart(frames, copy=False)

        return send

    async def _read(self) -> None:
        decoder = Decoder()
        while True:
            frames = read_frames(await self._socket.recv_multipart(copy=False))
            worker = self._workers.get(bytes(frames[0]))
            if worker is None or len(frames) < 3:
                self.refused += 1
                continue
            try:
                message = decoder.decode(frames[2:])
            except WireError:
                self.refused += 1
                continue
            if frames[1] == EVENT_ID:
                self._hear(worker, message)
            elif not worker.answer(bytes(frames[1]), message):
                self.unclaimed += 1

    def _hear(self, worker: Worker, message: Message) -> None:
        worker.hear(message)
        try:
            self._on_event(worker.name, message)
        except Exception as error:  # noqa: BLE001 - reported as the failure of this worker
            reason = f"said {type(message).__name__}, which could not be handled: {error!r}"
            worker.fail(reason, error=error)

    async def _stop_workers(self) -> None:
        workers = list(self._workers.values())
        try:
            await asyncio.gather(*(worker.stop() for worker in workers))
        finally:
            # Also when the stop itself is cancelled: nothing outlives the hub.
            for worker in workers:
                worker.kill()
            await asyncio.gather(*(worker.is_gone_within(None) for worker in workers))


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # A worker must find what the controller finds, such as modules beside the user's script.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    return {**os.environ, "PYTHONPATH": path, **extra}


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _local(folder: Path) -> str:
    path = folder / "hub"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"The path of the local socket, {str(path)!r}, is too long;"
            " set TMPDIR to a shorter folder."
        )
    return f"ipc://{path}"


def _loopback(address: str) -> str:
    """The address as zmq binds it; anything that other hosts could reach is refused."""
    parts = urlsplit(address)
    host, _, port = parts.netloc.rpartition(":")
    if parts.scheme != "tcp" or not host or not (port == "*" or port.isdecimal()):
        raise ConfigError(
            f"cluster.address = {address!r} is no address; write 'auto' or 'tcp://127.0.0.1:PORT'."
        )
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"cluster.address = {address!r} could be reached from other hosts without"
            " authentication; use 'auto' or 'tcp://127.0.0.1:PORT'."
        )
    return f"tcp://{host}:{'*' if port in ('*', '0') else port}"
