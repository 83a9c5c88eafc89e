"""The controller's side of the connection: one socket, and the worker processes behind it.

Promise: when a worker dies, every call that waits for it fails with the reason: at once, or within
`heartbeat_timeout_s` if it died on another host. If the hub itself can no longer receive, all
workers fail, and launch() raises RunFailed. No process, socket or file outlives the hub; if the hub
is killed, the next one removes its folder. Over TCP, only holders of the run's keys can send a
message. Anything that is not a message of a known worker is counted and dropped.

Runs on the controller's event loop. Bounds: the socket holds RECEIVE_MESSAGES per worker, then that
worker's sends block. A peer that announces a frame above `max_frame_bytes` is disconnected before
memory is allocated. Outgoing messages are bounded by the callers, who wait for replies.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from millrace.cluster import address as addresses
from millrace.cluster.address import RunKeys, TokenAuthenticator
from millrace.cluster.fork_server import shared_fork_server
from millrace.cluster.join.registry import JoinRegistry
from millrace.cluster.join.ticket import JoinTicket, own_versions
from millrace.cluster.launchers.launcher import Launcher, WorkerSpec
from millrace.cluster.link import EVENT_ID, identity_of, read_frames
from millrace.cluster.messages import Heartbeat, Message
from millrace.cluster.process import LocalLauncher
from millrace.cluster.wire import MAX_FRAME_BYTES, WireError, encode, message_decoder
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.files import MAX_SOCKET_PATH, check_file_name, private_folder

RECEIVE_MESSAGES = 1000


@dataclass(kw_only=True, eq=False)
class Hub:
    """Starts workers and carries calls to them; use as an async context manager."""

    log_dir: Path
    # Gets messages that are no replies: Hello, WorkerProgress, Published, Failed. An error in it
    # counts as a failure of that worker.
    on_event: Callable[[str, Message], None]
    # As in the settings; once the hub is entered, the address for workers on this host. With "auto"
    # the socket is in a private folder in `runtime_dir`, by default the temp dir.
    address: str = "auto"
    runtime_dir: Path | None = None
    advertise: str | None = None  # the name by which other hosts reach this one
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 10.0
    heartbeat_timeout_s: float = 30.0
    # Modules that a fork server imports once for all workers; without any, each imports its own.
    preload: Sequence[str] = ()
    max_frame_bytes: int = MAX_FRAME_BYTES  # a peer that announces more is disconnected
    num_invalid: int = 0  # messages of unknown senders, and bytes that are no message
    num_unclaimed: int = 0  # replies to calls that had ended

    def __post_init__(self) -> None:
        self._keys = None if self.address == "auto" else RunKeys.make()
        if self._keys is not None:
            self.address = addresses.to_bind(self.address)
        self._authenticator: TokenAuthenticator | None = None  # over TCP
        self.registry = JoinRegistry(self._send, heartbeat_timeout_s=self.heartbeat_timeout_s)
        # By routing id. Dead workers stay until the next one is added.
        self._workers: dict[bytes, Worker] = {}
        self._decoder = message_decoder()
        self._failure: Exception | None = None  # why nothing is received any more
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(private_folder(self.runtime_dir))
            if self.address == "auto":
                if len(os.fsencode(folder / "hub")) > MAX_SOCKET_PATH:
                    raise ConfigError(
                        f"The path of the local socket, {str(folder / 'hub')!r}, is too long;"
                        " set TMPDIR to a shorter folder."
                    )
                self.address = f"ipc://{folder / 'hub'}"
            fork_server = stack.enter_context(shared_fork_server(self.preload))
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            if self._keys is not None:
                self._authenticator = TokenAuthenticator(context, keys=self._keys.client)
                task = asyncio.create_task(self._authenticator.run(), name="hub-authenticator")
                stack.push_async_callback(_cancelled, task)
            self._socket = context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or it drops what it cannot send
            self._socket.setsockopt(zmq.SNDHWM, 0)  # with a bound it would drop messages
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
            self._socket.setsockopt(zmq.MAXMSGSIZE, self.max_frame_bytes)
            self._bind()
            self.local: Launcher = LocalLauncher(
                address=self.address,
                keys=None if self._keys is None else self._keys.client,
                log_dir=self.log_dir,
                fork_server=fork_server,
            )
            reader = asyncio.create_task(self._read(), name="hub-reader")
            stack.push_async_callback(_cancelled, reader)
            stack.push_async_callback(self._stop_workers)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._exit.aclose()

    @property
    def num_rejected(self) -> int:
        """Connections over TCP with another key than the run's."""
        return 0 if self._authenticator is None else self._authenticator.num_rejected

    async def launch(
        self,
        name: str,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        has_secrets: bool = False,
        launcher: Launcher | None = None,
    ) -> Worker:
        """Start `python -m module`, named as no living worker is, and wait for its Hello; by
        default on this host. The user's keys are in its environment only if it `has_secrets`."""
        check_file_name(name, of="A worker")
        if self._failure is not None:
            raise RunFailed(f"The hub failed: {self._failure!r}.") from self._failure
        token = secrets.token_hex(16)
        identity = identity_of(name, token=token)
        send = partial(self._send, identity)
        worker = Worker(name, send=send, stop_timeout_s=self.stop_timeout_s)
        self._workers = {id: other for id, other in self._workers.items() if not other.is_gone}
        self._workers[identity] = worker
        spec = WorkerSpec(
            name=name, module=module, token=token, env=env or {}, has_secrets=has_secrets
        )
        try:
            process = await (launcher or self.local).start(spec)
            await worker.start(process, timeout_s=self.start_timeout_s)
        except BaseException:  # a worker that does not come up leaves nothing behind
            worker.kill()
            await worker.is_gone_within(None)
            self._workers.pop(identity, None)  # a launch that began meanwhile may have removed it
            raise
        return worker

    def ticket(self) -> JoinTicket:
        """What another host needs to join."""
        assert self._keys is not None, "only a hub at a TCP address can be joined"
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return JoinTicket(
            address=addresses.advertised(bound, host=self.advertise),
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            keys=self._keys.client,
            token=self.registry.token,
            versions=own_versions(),
        )

    def _bind(self) -> None:
        if self._keys is not None:
            self._keys.apply(self._socket)
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
        try:
            while True:
                await self._dispatch(await self._socket.recv_multipart(copy=False))
        except Exception as error:  # noqa: BLE001 - reported by every worker and by launch()
            self._failure = error
            for worker in self._workers.values():
                worker.fail(f"is unreachable, because the hub failed: {error!r}", error=error)

    async def _dispatch(self, received: list[zmq.Frame]) -> None:
        frames = read_frames(received)
        identity = bytes(frames[0])
        worker = self._workers.get(identity)
        if len(frames) < 3 or (worker is None and not self.registry.is_host(identity)):
            self.num_invalid += 1
            return
        try:
            message = self._decoder.decode(frames[2:])
        except WireError:
            self.num_invalid += 1
            return
        if worker is None:
            is_handled = await self.registry.on_message(identity, bytes(frames[1]), message)
            self.num_invalid += not is_handled
        elif frames[1] == EVENT_ID:
            self._dispatch_event(worker, message)
        elif not worker.on_reply(bytes(frames[1]), message):
            self.num_unclaimed += 1

    def _dispatch_event(self, worker: Worker, message: Message) -> None:
        if worker.dead.done():
            return  # another worker may have its name by now
        worker.on_event(message)
        if isinstance(message, Heartbeat):
            return
        try:
            self.on_event(worker.name, message)
        except Exception as error:  # noqa: BLE001 - reported as the failure of this worker
            reason = f"sent {type(message).__name__}, which could not be handled: {error!r}"
            worker.fail(reason, error=error)

    async def _stop_workers(self) -> None:
        workers = list(self._workers.values())
        try:
            await asyncio.gather(*(worker.stop() for worker in workers))
        finally:
            # Also when the stop itself is cancelled: no process outlives the hub.
            for worker in workers:
                worker.kill()
            await asyncio.gather(*(worker.is_gone_within(None) for worker in workers))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
