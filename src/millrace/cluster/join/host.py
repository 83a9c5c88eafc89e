"""`millrace join`: runs workers on this host for a run whose controller is on another host.

Promise: the workers end with this process and with the controller: this process kills them when it
receives no heartbeat for the time limit in the ticket. It reports to the controller how each worker
ended. One asyncio loop in the main thread.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import zmq
import zmq.asyncio

from millrace.cluster import address as addresses
from millrace.cluster.address import Credentials, connect
from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import ForkServer, shared_fork_server
from millrace.cluster.join.registry import host_identity
from millrace.cluster.join.ticket import JoinTicket
from millrace.cluster.link import EVENT_ID, read_frames
from millrace.cluster.messages import (
    Error,
    Heartbeat,
    Join,
    JoinAdmitted,
    JoinSlot,
    Message,
    ProcessExit,
    SignalWorker,
    WorkerExited,
)
from millrace.cluster.process import Process, start_worker
from millrace.cluster.wire import decode, encode
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.files import check_file_name

REPLY_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0


def join(
    ticket: JoinTicket,
    *,
    module: str,
    count: int,
    log_dir: Path,
    preload: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> None:
    """Start `count` workers of `python -m module` here; returns when the run has stopped them.
    Raises ConfigError if the run does not admit them, RunFailed if one of them ends otherwise."""
    if count < 1:
        raise ConfigError(f"--count = {count} starts no worker; give 1 or more.")

    async def serve() -> None:
        await _check_reachable(ticket)
        context = zmq.asyncio.Context()
        try:
            host = _JoiningHost(dealer=context.socket(zmq.DEALER), ticket=ticket)
            slots = await host.join(count)
            log(f"Joined the run at {ticket.address} with {', '.join(s.name for s in slots)}.")
            with shared_fork_server(preload if count > 1 else ()) as host.fork_server:
                await host.serve(slots, module=module, log_dir=log_dir)
            log("The run has ended.")
        finally:
            context.destroy(linger=int(FLUSH_TIMEOUT_S * 1000))

    run_on_own_loop(serve)


async def _check_reachable(ticket: JoinTicket) -> None:
    """Raise ConfigError at once for the most common reasons why no run will answer."""
    host, port = addresses.split(ticket.address)
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        raise ConfigError(
            f"No run listens at {ticket.address} ({reason}): it has ended, or this host cannot"
            " reach it at that address; then set cluster.advertise of the run."
        ) from None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@dataclass(kw_only=True, eq=False)
class _JoiningHost:
    """The worker processes of this host, and its connection to the hub beside theirs."""

    dealer: zmq.asyncio.Socket
    ticket: JoinTicket
    fork_server: ForkServer | None = None
    _processes: dict[str, Process] = field(default_factory=dict[str, Process])
    # Done once they are reported.
    _exits: list[asyncio.Task[ProcessExit]] = field(default_factory=list)
    # The loop itself holds tasks weakly.
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)

    async def join(self, count: int) -> list[JoinSlot]:
        """Connect, and ask for slots for this many workers."""
        connect(
            self.dealer,
            self.ticket.address,
            identity=host_identity(self.ticket.token),
            keys=self.ticket.keys,
            heartbeat_timeout_s=self.ticket.heartbeat_timeout_s,
        )
        request = Join(host=socket.gethostname(), num_workers=count)
        await self._send(request, id=secrets.token_bytes(8))
        try:
            reply = await self._receive(REPLY_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                "The run does not accept this ticket, which is of an earlier run; copy the new one."
            ) from None
        if isinstance(reply, Error):
            raise ConfigError(reply.reason)
        assert isinstance(reply, JoinAdmitted), reply
        return reply.slots

    async def serve(self, slots: list[JoinSlot], *, module: str, log_dir: Path) -> None:
        """Start a worker for each slot; returns when the controller has stopped all of them."""
        orders = asyncio.create_task(self._follow_orders(), name="orders")
        try:
            for slot in slots:
                check_file_name(slot.name, of="A worker of this run")  # it comes from outside
                await self._start(slot, module=module, log=log_dir / f"{slot.name}.log")
            ended = asyncio.gather(*self._exits)
            await asyncio.wait({orders, ended}, return_when=asyncio.FIRST_COMPLETED)
            if orders.done():
                orders.result()  # raises: it ends in no other way
            exits = await ended
        finally:
            orders.cancel()
            await self._stop_workers(at_once=orders.done())
        for exit in exits:
            if exit.code != 0:
                raise RunFailed(f"A worker {exit.reason}.")

    async def _send(self, message: Message, *, id: bytes = EVENT_ID) -> None:
        await self.dealer.send_multipart([id, *encode(message)])

    async def _receive(self, timeout_s: float) -> Message:
        async with asyncio.timeout(timeout_s):
            _id, *frames = read_frames(await self.dealer.recv_multipart(copy=False))
        return decode(frames)

    async def _start(self, slot: JoinSlot, *, module: str, log: Path) -> None:
        process = await start_worker(
            slot.name,
            module,
            address=self.ticket.address,
            credentials=Credentials(token=slot.token, keys=self.ticket.keys),
            log=log,
            heartbeat_timeout_s=self.ticket.heartbeat_timeout_s,
            fork_server=self.fork_server,
        )
        self._processes[slot.name] = process
        self._exits.append(asyncio.create_task(self._report_exit(slot.name, process)))

    async def _follow_orders(self) -> NoReturn:
        """Handle messages of the controller; raises RunFailed when it is silent for too long."""
        timeout_s = self.ticket.heartbeat_timeout_s
        while True:
            try:
                message = await self._receive(timeout_s)
            except TimeoutError:
                raise RunFailed(
                    f"The controller at {self.ticket.address} was silent for {timeout_s} s;"
                    " the workers on this host were stopped."
                ) from None
            if isinstance(message, SignalWorker) and message.worker in self._processes:
                self._signal(self._processes[message.worker], message.action)
            else:
                assert isinstance(message, Heartbeat | SignalWorker), message

    def _signal(self, process: Process, action: str) -> None:
        if action == "terminate":
            process.terminate()
        elif action == "kill":
            process.kill()
        else:
            aborting = asyncio.create_task(_abort(process))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    async def _report_exit(self, name: str, process: Process) -> ProcessExit:
        exit = await process.exited()
        with contextlib.suppress(TimeoutError):  # the controller has ended
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._send(WorkerExited(worker=name, exit=exit))
        return exit

    async def _stop_workers(self, *, at_once: bool) -> None:
        """Stop the workers that still run."""
        try:
            if self._exits and not at_once:
                for process in self._processes.values():
                    process.terminate()
                await asyncio.wait(self._exits, timeout=STOP_TIMEOUT_S)
        finally:
            for process in self._processes.values():
                process.kill()
            if self._exits:
                await asyncio.wait(self._exits)


async def _abort(process: Process) -> None:
    await process.dump_stacks()
    process.kill()
