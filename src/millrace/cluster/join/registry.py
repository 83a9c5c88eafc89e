"""Registry of joining hosts: `millrace join` asks it for slots and brings a worker for each.

Promise: a slot is given once, to a host that has the token of the ticket. A host can report about
its own workers only. Runs on the controller's event loop.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

import zmq
from msgspec.structs import replace

from millrace.cluster.join.joined_process import JoinedProcess
from millrace.cluster.link import EVENT_ID, identity_of
from millrace.cluster.messages import Error, Join, JoinAdmitted, JoinSlot, Message, WorkerExited

Send = Callable[[bytes, bytes, Message], Awaitable[None]]  # routing id, call id, message


def host_identity(token: str) -> bytes:
    """Routing id of a host; several hosts may use copies of one ticket."""
    return f"host:{token}:{secrets.token_hex(8)}".encode()


class JoinRegistry:
    def __init__(self, *, send: Send, heartbeat_timeout_s: float) -> None:
        self.token = secrets.token_hex(16)
        self._send = send
        self._heartbeat_timeout_s = heartbeat_timeout_s
        # Workers that no host has brought yet, in the order they are given.
        self._free: list[tuple[JoinSlot, asyncio.Future[JoinedProcess]]] = []
        self._num_taken = 0
        self._processes: dict[tuple[bytes, str], JoinedProcess] = {}  # by host's routing id, worker

    def is_host(self, identity: bytes) -> bool:
        prefix = f"host:{self.token}:".encode()
        return secrets.compare_digest(identity[: len(prefix)], prefix)

    async def wait_for_host(
        self, name: str, token: str, *, timeout_s: float | None
    ) -> JoinedProcess:
        """Offer a slot and wait until a host takes it; raises TimeoutError if none does."""
        joined: asyncio.Future[JoinedProcess] = asyncio.get_running_loop().create_future()
        offer = JoinSlot(name=name, token=token), joined
        self._free.append(offer)
        try:
            async with asyncio.timeout(timeout_s):
                return await joined
        finally:
            if offer in self._free:
                self._free.remove(offer)

    async def on_message(self, host: bytes, call_id: bytes, message: Message) -> bool:
        """Handle a message of a host; False if a host may not send it."""
        match message:
            case Join():
                reply = self._admit(host, message)
                # If the host has ended, the heartbeats of its workers will show it.
                with contextlib.suppress(zmq.ZMQError):
                    await self._send(host, call_id, reply)
            case WorkerExited(worker=worker, exit=exit) if (host, worker) in self._processes:
                process = self._processes.pop((host, worker))
                process.on_exit(replace(exit, reason=f"{exit.reason} on {process.host}"))
            case _:
                return False
        return True

    def _admit(self, host: bytes, request: Join) -> JoinAdmitted | Error:
        wanted, free = request.num_workers, len(self._free)
        if not 1 <= wanted <= free:
            slots = "1 free slot" if free == 1 else f"{free} free slots"
            reason = f"The run has {slots} and {self._num_taken} taken, but --count = {wanted}"
            reason += "; lower --count." if free else "; raise engine.remote of the run."
            return Error(kind="ConfigError", reason=reason, traceback="")
        taken, self._free = self._free[:wanted], self._free[wanted:]
        self._num_taken += wanted
        for slot, joined in taken:
            worker = identity_of(slot.name, token=slot.token)
            process = self._processes[host, slot.name] = JoinedProcess(
                name=slot.name,
                host=request.host,
                send_to_worker=partial(self._send, worker, EVENT_ID),
                send_to_host=partial(self._send, host, EVENT_ID),
                heartbeat_timeout_s=self._heartbeat_timeout_s,
            )
            joined.set_result(process)
        return JoinAdmitted(slots=[slot for slot, _ in taken])
