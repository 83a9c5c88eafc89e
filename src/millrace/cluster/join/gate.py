"""Where other hosts come in: `millrace join` asks here for places, and brings their workers.

Promise: a place is given once, to a host that shows the ticket's token; what a host says counts
for its own workers only. Runs on the controller's event loop.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq

from millrace.cluster.join.guest import JoinedProcess
from millrace.cluster.link import EVENT_ID
from millrace.cluster.messages import Dumped, Ended, Error, Join, JoinAdmitted, JoinPlace, Message
from millrace.cluster.process import ProcessExit

Tell = Callable[[bytes, bytes, Message], Awaitable[None]]  # routing id, call id, message


def host_identity(token: str) -> bytes:
    """Routing id of a host; several may come with copies of one ticket."""
    return f"host:{token}:{secrets.token_hex(8)}".encode()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Opening:
    """A place that nobody has taken yet."""

    name: str
    token: str  # for the worker alone; the host passes it on
    worker: bytes  # routing id
    arrival: asyncio.Future[JoinedProcess]


class JoinGate:
    def __init__(self, *, tell: Tell, heartbeat_timeout_s: float) -> None:
        self.token = secrets.token_hex(16)
        self._tell = tell
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._openings: list[_Opening] = []  # in the order they are given
        self._num_given = 0
        self._guests: dict[tuple[bytes, str], JoinedProcess] = {}  # by host's routing id and worker

    def knows(self, identity: bytes) -> bool:
        prefix = f"host:{self.token}:".encode()
        return secrets.compare_digest(identity[: len(prefix)], prefix)

    async def arrival(
        self, name: str, *, token: str, worker: bytes, timeout_s: float | None
    ) -> JoinedProcess:
        """Open a place and wait for a host to take it; TimeoutError if none does."""
        taken = asyncio.get_running_loop().create_future()
        opening = _Opening(name=name, token=token, worker=worker, arrival=taken)
        self._openings.append(opening)
        try:
            async with asyncio.timeout(timeout_s):
                return await taken
        finally:
            if opening in self._openings:
                self._openings.remove(opening)

    async def hear(self, host: bytes, call_id: bytes, message: Message) -> bool:
        """Handle what a host says; False if a host has no business saying it."""
        match message:
            case Join():
                answer = self._admit(host, message)
                with contextlib.suppress(zmq.ZMQError):  # it is gone; the guests' beats tell
                    await self._tell(host, call_id, answer)
            case Ended() if (host, message.worker) in self._guests:
                guest = self._guests.pop((host, message.worker))
                guest.told(
                    ProcessExit(
                        reason=f"{message.reason} on {guest.host}",
                        account=message.log_tail,
                        may_have_spoken=message.may_have_spoken,
                    )
                )
            case Dumped() if (host, message.worker) in self._guests:
                self._guests[host, message.worker].told_stacks(message)
            case _:
                return False
        return True

    def _admit(self, host: bytes, wish: Join) -> JoinAdmitted | Error:
        wanted, free = wish.num_workers, len(self._openings)
        if not 1 <= wanted <= free:
            places = "1 place" if free == 1 else f"{free} places"
            reason = (
                f"The run has {places} left, and {self._num_given} taken, but --count = {wanted}"
            )
            reason += "; lower --count." if free else "; raise engine.remote of the run."
            return Error(kind="ConfigError", reason=reason, traceback="")
        given, self._openings = self._openings[:wanted], self._openings[wanted:]
        self._num_given += wanted
        for opening in given:
            guest = self._guest(opening, host=host, host_name=wish.host)
            self._guests[host, opening.name] = guest
            opening.arrival.set_result(guest)
        return JoinAdmitted(
            places=[JoinPlace(name=place.name, token=place.token) for place in given]
        )

    def _guest(self, opening: _Opening, *, host: bytes, host_name: str) -> JoinedProcess:
        return JoinedProcess(
            opening.name,
            host=host_name,
            tell_worker=lambda message: self._tell(opening.worker, EVENT_ID, message),
            tell_host=lambda message: self._tell(host, EVENT_ID, message),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
