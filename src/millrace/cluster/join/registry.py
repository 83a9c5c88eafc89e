"""Registry of joining hosts: `millrace join` asks it for slots and brings a worker for each.

Promise: a slot is given once, to a host that has the token of the ticket. A host can report about
its own workers only. Runs on the controller's event loop.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import zmq
from msgspec.structs import replace

from millrace.cluster import messages
from millrace.cluster.launchers.launcher import (
    NO_NEEDS,
    HostDevice,
    JoinSlot,
    ProcessExit,
    Resources,
    WorkerProcess,
)
from millrace.cluster.link import EVENT_ID, identity_of
from millrace.core.errors import ConfigError

MAX_INTERVAL_S = 1.0  # between two heartbeats
MIN_BEATS_PER_TIMEOUT = 4
DUMP_TIMEOUT_S = 5.0  # for a host to dump the stacks of a worker and report its end

Send = Callable[[bytes, bytes, messages.Message], Awaitable[None]]  # routing id, call id, message
SendTo = Callable[[messages.Message], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class JoinedProcess(WorkerProcess):
    """The process of a worker on another host; created when the host is admitted. No signal reaches
    it, and its exit status is unknown here. Its end shows in one of three ways: its host reports
    it, its connection is gone when the next heartbeat is sent, or it does not answer heartbeats for
    too long. Promise: one of the three happens, so exited() returns."""

    name: str
    host: str | None  # pid and log are unknown here
    send_to_worker: SendTo
    send_to_host: SendTo
    heartbeat_timeout_s: float
    devices: tuple[HostDevice, ...] = ()

    def __post_init__(self) -> None:
        self._interval_s = min(MAX_INTERVAL_S, self.heartbeat_timeout_s / MIN_BEATS_PER_TIMEOUT)
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._is_connected = False  # after its first message; the hub limits the time until then
        self._has_answered = False  # since the last heartbeat
        self._is_killed = False
        self._sending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def exited(self) -> ProcessExit:
        """Send heartbeats until the process has ended or counts as dead."""
        silent_s = 0.0
        while not self._exit.done():
            self._has_answered = False
            try:
                # To the host as well: without heartbeats it takes the controller for dead.
                await self.send_to_host(messages.Heartbeat())
                if self._is_killed:  # the host may not have started the process before
                    self._signal("kill")
                if self._is_connected:
                    await self.send_to_worker(messages.Heartbeat())
            except zmq.ZMQError:
                await self._wait_for_exit(self._interval_s)  # its host may know the reason
                self.on_exit(ProcessExit(reason=f"lost its connection from {self.host}"))
                break
            await self._wait_for_exit(self._interval_s)
            # Count intervals, not seconds: a busy controller receives no answers either.
            is_silent = self._is_connected and not self._has_answered
            silent_s = silent_s + self._interval_s if is_silent else 0.0
            if silent_s >= self.heartbeat_timeout_s:
                self.kill()  # it may be alive and hang
                reason = f"on {self.host} answered no heartbeat for {self.heartbeat_timeout_s} s"
                self.on_exit(ProcessExit(reason=reason))
        return self._exit.result()

    def on_end(self, do: Callable[[], object]) -> None:
        """Call this when the process has ended or counts as dead."""
        self._exit.add_done_callback(lambda _: do())

    def on_message(self) -> None:
        self._is_connected = self._has_answered = True

    def on_exit(self, exit: ProcessExit) -> None:
        """The host reports that the worker has ended."""
        if not self._exit.done():
            self._exit.set_result(exit)

    async def dump_stacks(self) -> tuple[str, str]:
        self._signal("abort")
        await self._wait_for_exit(DUMP_TIMEOUT_S)
        if not self._exit.done():
            return f"its log is on {self.host}", ""
        return self._exit.result().reason, self._exit.result().log_tail

    def terminate(self) -> None:
        self._signal("terminate")

    def kill(self) -> None:
        self._is_killed = True
        self._signal("kill")

    async def _wait_for_exit(self, timeout_s: float) -> None:
        await asyncio.wait({self._exit}, timeout=timeout_s)

    def _signal(self, action: Literal["terminate", "kill", "abort"]) -> None:
        async def send() -> None:
            with contextlib.suppress(zmq.ZMQError):  # the next heartbeat fails alike and reports it
                await self.send_to_host(messages.SignalWorker(worker=self.name, action=action))

        if not self._exit.done():
            task = asyncio.create_task(send(), name=f"{action}-{self.name}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)


def host_identity(token: str) -> bytes:
    """Routing id of a host; several hosts may use copies of one ticket."""
    return f"host:{token}:{secrets.token_hex(8)}".encode()


class _SlotOffer(NamedTuple):
    """The slot of a worker that no host has brought yet."""

    slot: JoinSlot
    role: str
    needs: Resources
    joined: asyncio.Future[JoinedProcess]


class JoinRegistry:
    def __init__(self, send: Send, *, heartbeat_timeout_s: float) -> None:
        self.token = secrets.token_hex(16)
        self._send = send
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._free: list[_SlotOffer] = []  # in the order they are given
        self._taken: Counter[str] = Counter()  # by role
        self._processes: dict[tuple[bytes, str], JoinedProcess] = {}  # by host's routing id, worker

    def is_host(self, identity: bytes) -> bool:
        prefix = f"host:{self.token}:".encode()
        return secrets.compare_digest(identity[: len(prefix)], prefix)

    async def wait_for_host(
        self, name: str, token: str, *, role: str, needs: Resources = NO_NEEDS
    ) -> JoinedProcess:
        """Offer a slot for a worker and wait until a host that brings this role takes it."""
        slot = JoinSlot(name=name, token=token, num_gpus=needs.gpus)
        offer = _SlotOffer(slot, role, needs, asyncio.get_running_loop().create_future())
        self._free.append(offer)
        try:
            return await offer.joined
        finally:
            if offer in self._free:
                self._free.remove(offer)

    async def on_message(self, host: bytes, call_id: bytes, message: messages.Message) -> bool:
        """Handle a message of a host; False if a host may not send it."""
        match message:
            case messages.Join():
                reply = self._admit(host, message)
                # If the host has ended, the heartbeats of its workers will show it.
                with contextlib.suppress(zmq.ZMQError):
                    await self._send(host, call_id, reply)
            case messages.WorkerExited(exit=exit) if (host, message.worker) in self._processes:
                process = self._processes.pop((host, message.worker))
                process.on_exit(replace(exit, reason=f"{exit.reason} on {process.host}"))
            case _:
                return False
        return True

    def _admit(self, host: bytes, request: messages.Join) -> messages.JoinAdmitted | messages.Error:
        role, wanted = request.role, request.num_workers
        # One whose wait was just cancelled is still listed until the waiting task runs.
        offers = [o for o in self._free if o.role == role and not o.joined.done()]
        if not 1 <= wanted <= len(offers):
            slots = "1 free slot" if len(offers) == 1 else f"{len(offers)} free slots"
            reason = f"The run has {slots} for {role}s and {self._taken[role]} taken, but --count ="
            reason += f" {wanted}; {'lower --count' if offers else f'raise {role}.remote'}."
            return messages.Error(kind="ConfigError", reason=reason, traceback="")
        taken = offers[:wanted]
        try:
            chosen = _chosen_devices([offer.needs for offer in taken], request)
        except ConfigError as error:
            return messages.Error(kind="ConfigError", reason=str(error), traceback="")
        self._taken[role] += wanted
        for offer, devices in zip(taken, chosen, strict=True):
            self._free.remove(offer)
            slot = offer.slot
            worker = identity_of(slot.name, token=slot.token)
            process = self._processes[host, slot.name] = JoinedProcess(
                name=slot.name,
                host=request.host,
                send_to_worker=partial(self._send, worker, EVENT_ID),
                send_to_host=partial(self._send, host, EVENT_ID),
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                devices=devices,
            )
            process.on_end(partial(self._taken.subtract, [role]))
            offer.joined.set_result(process)
        return messages.JoinAdmitted(slots=[offer.slot for offer in taken])


def _chosen_devices(
    needs: Sequence[Resources], request: messages.Join
) -> list[tuple[HostDevice, ...]]:
    """The devices of each worker, as its host gives them to it: the next GPUs, or the CPU. Raises
    ConfigError if they are too few or too small."""
    gpus = [device for device in request.devices if device.is_gpu]
    cpu = tuple(device for device in request.devices if not device.is_gpu)
    num_needed, are_several = sum(needed.gpus for needed in needs), len(needs) > 1
    if len(gpus) < num_needed and (gpus or not all(needed.or_cpu for needed in needs)):
        who = f"{len(needs)} {request.role}s need" if are_several else f"One {request.role} needs"
        remedy = "lower --count" if are_several else "run `millrace join` on a host with more"
        raise ConfigError(
            f"{who} {num_needed} GPU{'s' if num_needed > 1 else ''}, and {request.host} has"
            f" {len(gpus) or 'none'}; {remedy}"
            f"{', or repeat GPUs in --device to share them' if gpus else ''}."
        )
    chosen = list[tuple[HostDevice, ...]]()
    used: Counter[HostDevice] = Counter()
    for needed in needs:
        own, gpus = tuple(gpus[: needed.gpus]), gpus[needed.gpus :]
        chosen.append(own or cpu)
        used.update(dict.fromkeys(chosen[-1], needed.device_bytes))
    for device, min_bytes in used.items():
        if min_bytes > device.total_bytes:
            raise ConfigError(
                f"Device {device.name!r} of {request.host} has {device.total_bytes / 2**30:.1f}"
                f" GiB, and needs {min_bytes / 2**30:.1f} GiB for weights and optimizer state"
                f" alone; {'lower --count, or ' if are_several else ''}name other GPUs in --device."
            )
    return chosen
