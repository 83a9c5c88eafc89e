"""The controller's end of the wire: one socket, and the worker processes behind it.

Promise: a worker that dies fails every call that waits for it, at once and with its own account, or
within `heartbeat_timeout_s` if it died on another host; no process, socket or file of the hub
outlives it, but for a folder that the next hub removes where this one was killed. Over TCP, only
holders of the run's keys get a message in. What is no message of a known worker is counted and
dropped.

Everything here runs on the controller's event loop. Bounds: the socket takes in RECEIVE_MESSAGES
per worker and then lets that worker's sends block. Sending is not bounded by the socket, whose
choice at a full queue would be to drop; it is bounded by the callers, who wait for their replies.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from millrace.cluster import address as addresses
from millrace.cluster.credentials import Credentials, RunKeys, TokenAuthenticator
from millrace.cluster.join.gate import JoinGate
from millrace.cluster.join.ticket import JoinTicket
from millrace.cluster.link import EVENT_ID, identity_of, read_frames
from millrace.cluster.messages import Beat, Message
from millrace.cluster.private_folder import private_folder
from millrace.cluster.process import start_worker
from millrace.cluster.wire import WireError, encode, message_decoder
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.files import check_file_name

RECEIVE_MESSAGES = 1000

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
        advertise: str | None = None,
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 10.0,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """At "auto" the socket lies in a private folder in `runtime_dir`, by default the temp dir.

        `advertise` is the name by which other hosts reach this one.
        """
        self.refused = 0  # messages from strangers, and what was no message at all
        self.unclaimed = 0  # replies to calls that were given up
        self.address = address if address == "auto" else addresses.to_bind(address)
        """Where workers on this host connect, once the hub is entered."""
        self._keys = None if address == "auto" else RunKeys.make()
        self._doorkeeper: TokenAuthenticator | None = None  # over TCP
        self._advertise = advertise
        self._runtime_parent = runtime_dir
        self._log_dir = log_dir
        self._on_event = on_event
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._gate = JoinGate(tell=self._send, heartbeat_timeout_s=heartbeat_timeout_s)
        # By routing id: launched or expected. The dead stay until the next one comes.
        self._workers: dict[bytes, Worker] = {}
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(private_folder(self._runtime_parent))
            if self.address == "auto":
                self.address = _local(folder)
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            if self._keys is not None:
                self._doorkeeper = TokenAuthenticator(context, keys=self._keys.client)
                keeping = asyncio.create_task(self._doorkeeper.run(), name="hub-doorkeeper")
                stack.push_async_callback(_cancelled, keeping)
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

    @property
    def turned_away(self) -> int:
        """Connections over TCP whose key is not the run's."""
        return 0 if self._doorkeeper is None else self._doorkeeper.turned_away

    async def launch(
        self, name: str, module: str, *, env: Mapping[str, str] | None = None
    ) -> Worker:
        """Start `python -m module` as the worker `name` and wait for its Hello.

        The name may be that of a worker that died.
        """
        check_file_name(name, of="A worker")
        token = secrets.token_hex(16)
        async with self._enrolled(name, identity=identity_of(name, token=token)) as worker:
            keys = None if self._keys is None else self._keys.client
            process = await start_worker(
                name,
                module,
                address=self.address,
                credentials=Credentials(token=token, keys=keys),
                log=self._log_dir / f"{name}.log",
                env=env,
            )
            await worker.start(process, timeout_s=self._start_timeout_s)
        return worker

    async def await_joined(self, name: str, *, timeout_s: float | None) -> Worker:
        """Wait for another host to bring the worker `name`, and for its Hello; None = however long
        that takes."""
        token = secrets.token_hex(16)
        identity = identity_of(name, token=token)
        async with self._enrolled(name, identity=identity) as worker:
            try:
                guest = await self._gate.arrival(
                    name, token=token, worker=identity, timeout_s=timeout_s
                )
            except TimeoutError:
                raise WorkerError(
                    f"No host joined with {name!r} within {timeout_s} s; run `millrace join` there"
                    " sooner, or raise cluster.join_timeout_s.",
                    worker=name,
                ) from None
            await worker.start(guest, timeout_s=self._start_timeout_s)
        return worker

    def ticket(self) -> JoinTicket:
        """What another host needs to bring workers."""
        assert self._keys is not None, "only a hub at a TCP address can be joined"
        keys = self._keys.client
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return JoinTicket(
            address=addresses.advertised(bound, host=self._advertise),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            server_key=keys.server,
            client_key=keys.public,
            client_secret=keys.secret,
            token=self._gate.token,
        )

    @contextlib.asynccontextmanager
    async def _enrolled(self, name: str, *, identity: bytes) -> AsyncIterator[Worker]:
        """A worker whose messages are let in; one that does not come up leaves nothing behind."""

        async def send(call_id: bytes, message: Message) -> None:
            await self._send(identity, call_id, message)

        worker = Worker(name, send=send, stop_timeout_s=self._stop_timeout_s)
        self._workers = {id: other for id, other in self._workers.items() if not other.is_gone}
        self._workers[identity] = worker
        try:
            yield worker
        except BaseException:
            worker.kill()
            await worker.is_gone_within(None)
            del self._workers[identity]
            raise

    def _bind(self) -> None:
        if self._keys is not None:
            self._keys.lock(self._socket)
            self._socket.setsockopt(zmq.IPV6, int(addresses.is_ipv6(self.address)))
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen at cluster.address = {self.address!r}: {error}; choose another."
            ) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = bound if self._keys is None else addresses.local(bound)

    async def _send(self, identity: bytes, call_id: bytes, message: Message) -> None:
        await self._socket.send_multipart([identity, call_id, *encode(message)], copy=False)

    async def _read(self) -> None:
        decoder = message_decoder()
        while True:
            frames = read_frames(await self._socket.recv_multipart(copy=False))
            identity = bytes(frames[0])
            worker = self._workers.get(identity)
            if len(frames) < 3 or (worker is None and not self._gate.knows(identity)):
                self.refused += 1
                continue
            try:
                message = decoder.decode(frames[2:])
            except WireError:
                self.refused += 1
                continue
            if worker is None:
                self.refused += not await self._gate.hear(identity, bytes(frames[1]), message)
            elif frames[1] == EVENT_ID:
                self._hear(worker, message)
            elif not worker.answer(bytes(frames[1]), message):
                self.unclaimed += 1

    def _hear(self, worker: Worker, message: Message) -> None:
        if worker.dead.done():
            return  # another may have its name by now
        worker.hear(message)
        if isinstance(message, Beat):
            return
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


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _local(folder: Path) -> str:
    path = folder / "hub"
    if len(os.fsencode(path)) > addresses.MAX_SOCKET_PATH:
        raise ConfigError(
            f"The path of the local socket, {str(path)!r}, is too long;"
            " set TMPDIR to a shorter folder."
        )
    return f"ipc://{path}"
