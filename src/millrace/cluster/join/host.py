"""`millrace join`: runs workers on this host for a run whose controller is on another host.

Promise: the workers end with this process and with the controller: this process kills them when it
receives no heartbeat for the time limit in the ticket. It reports to the controller how each worker
ended, and asks for a place for another one, beside those that run. One asyncio loop in the main
thread.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import zmq
import zmq.asyncio
from msgspec.structs import replace

from millrace.cluster import address as addresses
from millrace.cluster import messages
from millrace.cluster.address import connect
from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import shared_fork_server
from millrace.cluster.join.registry import host_identity
from millrace.cluster.join.ticket import JoinTicket, check_versions
from millrace.cluster.launchers.launcher import HostDevice, JoinSlot, ProcessExit, WorkerSpec
from millrace.cluster.link import EVENT_ID, read_frames
from millrace.cluster.process import LocalLauncher, Process
from millrace.cluster.wire import decode, encode
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.files import check_file_name

REPLY_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0
ASK_AGAIN_S = 1.0


def join(
    ticket: JoinTicket,
    *,
    module: str,
    count: int,
    log_dir: Path,
    role: str = "engine",
    preload: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    devices: Sequence[HostDevice] = (),
    folder: Path | None = None,
    has_secrets: bool = False,
    restarts: bool = False,
    log: Callable[[str], None] = print,
) -> None:
    """Start `count` workers of `python -m module` here; returns when the run has stopped them.
    Raises ConfigError if the run does not admit them, RunFailed if one of them ends otherwise and
    is not started again, as it is with `restarts` while the run has a place for it. `env` and
    `folder`, where they run, are the workers'; they share out the `devices`, see own_gpus()."""
    if count < 1:
        raise ConfigError(f"--count = {count} starts no worker; give 1 or more.")
    check_versions(ticket)

    async def serve() -> None:
        await _check_reachable(ticket)
        context = zmq.asyncio.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            launcher = LocalLauncher(
                address=ticket.address,
                keys=ticket.keys,
                log_dir=log_dir,
                heartbeat_timeout_s=ticket.heartbeat_timeout_s,
                folder=folder,
            )
            spec = WorkerSpec(
                name=role, module=module, token="", env=env or {}, has_secrets=has_secrets
            )
            host = _JoiningHost(
                dealer=dealer, ticket=ticket, launcher=launcher, spec=spec, devices=devices, log=log
            )
            slots = await host.join(count)
            log(f"Joined the run at {ticket.address} with {', '.join(s.name for s in slots)}.")
            with shared_fork_server(preload if count > 1 else ()) as launcher.fork_server:
                await host.serve(slots, restarts=restarts)
            log("The run has ended.")
        finally:
            context.destroy(linger=int(FLUSH_TIMEOUT_S * 1000))

    run_on_own_loop(serve)


def own_gpus(
    named: str | None, *, found: Sequence[HostDevice], visible: str | None
) -> list[HostDevice]:
    """The GPUs of this host for workers that join. `named`: those of --device, such as
    "cuda:1,cuda:2"; by default all that PyTorch has `found`. `visible`: CUDA_VISIBLE_DEVICES."""
    gpus = [device for device in found if device.is_gpu]
    entries = visible.split(",") if visible else [str(i) for i in range(len(gpus))]
    known = {gpu.name: replace(gpu, entry=entry) for gpu, entry in zip(gpus, entries, strict=False)}
    if named is None:
        return list(known.values())
    if unknown := [device for device in named.split(",") if device not in known]:
        raise ConfigError(
            f"--device names {unknown[0]!r}, and PyTorch sees {', '.join(known) or 'no GPU'} on"
            " this host; list GPUs as in cuda:0,cuda:1."
        )
    return [known[device] for device in named.split(",")]


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
    launcher: LocalLauncher
    spec: WorkerSpec  # of all workers; its name is their role
    log: Callable[[str], None]
    devices: Sequence[HostDevice] = ()  # for its workers, in this order; its CPU last
    _processes: dict[str, Process] = field(default_factory=dict[str, Process])
    # Done once they are reported.
    _exits: list[asyncio.Task[ProcessExit]] = field(default_factory=list)
    # The loop itself holds tasks weakly.
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)
    # Answers to requests for a place, of which there is one at a time.
    _answers: asyncio.Queue[messages.Message] = field(default_factory=asyncio.Queue)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def join(self, count: int) -> list[JoinSlot]:
        """Connect, and ask for slots for this many workers."""
        connect(
            self.dealer,
            self.ticket.address,
            identity=host_identity(self.ticket.token),
            keys=self.ticket.keys,
            heartbeat_timeout_s=self.ticket.heartbeat_timeout_s,
        )
        await self._ask(count, self.devices)
        try:
            reply = await self._receive(REPLY_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                "The run does not accept this ticket, which is of an earlier run; copy the new one."
            ) from None
        if isinstance(reply, messages.Error):
            raise ConfigError(reply.reason)
        assert isinstance(reply, messages.JoinAdmitted), reply
        return reply.slots

    async def serve(self, slots: list[JoinSlot], *, restarts: bool) -> None:
        """Start a worker for each slot; returns when the controller has stopped all of them."""
        orders = asyncio.create_task(self._follow_orders(), name="orders")
        places: list[asyncio.Task[ProcessExit]] = []
        gpus = [device for device in self.devices if device.is_gpu]
        try:
            for slot in slots:
                own, gpus = gpus[: slot.num_gpus], gpus[slot.num_gpus :]
                worker = await self._start(slot, own)
                filling = self._fill(slot, own, worker) if restarts else worker
                places.append(asyncio.ensure_future(filling))
            ended = asyncio.gather(*places)
            # Read by nothing else if `orders` has failed: asyncio would print a traceback.
            ended.add_done_callback(asyncio.Future.exception)
            await asyncio.wait({orders, ended}, return_when=asyncio.FIRST_COMPLETED)
            if orders.done():
                orders.result()  # raises: it ends in no other way
            exits = await ended
        finally:
            orders.cancel()
            for place in places:
                if place not in self._exits:
                    place.cancel()
            await self._stop_workers(at_once=orders.done())
        for exit in exits:
            if exit.code != 0:
                raise RunFailed(f"A worker {exit.reason}.")

    async def _start(self, slot: JoinSlot, gpus: Sequence[HostDevice]) -> asyncio.Task[ProcessExit]:
        """Start a worker; the task ends with it, once its end is reported."""
        check_file_name(slot.name, of="A worker of this run")  # it comes from outside
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.entry for gpu in gpus)} if gpus else {}
        env = {**self.spec.env, **chosen}
        spec = dataclasses.replace(self.spec, name=slot.name, token=slot.token, env=env)
        process = await self.launcher.start(spec)
        self._processes[slot.name] = process
        self._exits.append(asyncio.create_task(self._report_exit(slot.name, process)))
        return self._exits[-1]

    async def _fill(
        self, slot: JoinSlot, gpus: Sequence[HostDevice], worker: asyncio.Task[ProcessExit]
    ) -> ProcessExit:
        """Start another worker when one dies; returns how the last one ended. The restart policy is
        the run's: it offers a place, or it ends."""
        while True:
            await asyncio.wait({worker})
            if (exit := worker.result()).code == 0:  # the run has stopped it
                return exit
            self.log(f"{slot.name} {exit.reason}; asking the run for its place.")
            async with self._asking:
                if (given := await self._ask_again(gpus)) is None:
                    return exit
                slot, worker = given, await self._start(given, gpus)
            self.log(f"Started {slot.name}.")

    async def _ask_again(self, gpus: Sequence[HostDevice]) -> JoinSlot | None:
        """Wait for a place for one worker; None if the run has ended."""
        refusal = ""
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            try:
                await _check_reachable(self.ticket)
            except ConfigError:
                return None
            await self._ask(1, [*gpus, *(d for d in self.devices if not d.is_gpu)])
            answer = await self._answers.get()
            if isinstance(answer, messages.JoinAdmitted):
                return answer.slots[0]
            assert isinstance(answer, messages.Error), answer
            if answer.reason != refusal:
                refusal = answer.reason
                self.log(f"Waiting for a place: {refusal}")

    async def _ask(self, count: int, devices: Sequence[HostDevice]) -> None:
        host, role = socket.gethostname(), self.spec.name
        request = messages.Join(host=host, num_workers=count, role=role, devices=tuple(devices))
        await self._send(request, id=secrets.token_bytes(8))

    async def _send(self, message: messages.Message, *, id: bytes = EVENT_ID) -> None:
        await self.dealer.send_multipart([id, *encode(message)])

    async def _receive(self, timeout_s: float) -> messages.Message:
        async with asyncio.timeout(timeout_s):
            _id, *frames = read_frames(await self.dealer.recv_multipart(copy=False))
        return decode(frames)

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
            if isinstance(message, messages.SignalWorker) and message.worker in self._processes:
                self._signal(self._processes[message.worker], message.action)
            elif isinstance(message, messages.JoinAdmitted | messages.Error):
                self._answers.put_nowait(message)
            else:
                assert isinstance(message, messages.Heartbeat | messages.SignalWorker), message

    def _signal(self, process: Process, action: str) -> None:
        async def abort() -> None:
            await process.dump_stacks()
            process.kill()

        if action == "terminate":
            process.terminate()
        elif action == "kill":
            process.kill()
        else:
            aborting = asyncio.create_task(abort())
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    async def _report_exit(self, name: str, process: Process) -> ProcessExit:
        exit = await process.exited()
        with contextlib.suppress(TimeoutError):  # the controller has ended
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._send(messages.WorkerExited(worker=name, exit=exit))
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
