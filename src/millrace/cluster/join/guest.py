"""The process of a worker on another host, as far as it can be known from here.

No signal reaches it and no wait() tells of its end. Three things do: its host says so; its
connection is gone when the next beat shall be sent; or it answers no beat for too long.

Promise: one of the three happens, so ended() returns.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import zmq

from millrace.cluster.messages import Beat, Dumped, DumpStacks, EndWorker, Message
from millrace.cluster.process import ProcessExit

BEAT_S = 1.0  # between two beats, at most
BEATS_PER_TIMEOUT = 4  # at least
DUMP_TIMEOUT_S = 5.0  # for a host to tell of a worker's stacks

Tell = Callable[[Message], Awaitable[None]]


class JoinedProcess:
    """Made by the gate when a host is admitted. Runs on the controller's event loop."""

    def __init__(
        self,
        name: str,
        *,
        host: str,
        tell_worker: Tell,
        tell_host: Tell,
        heartbeat_timeout_s: float,
    ) -> None:
        self.name = name
        self.host = host
        self._tell_worker = tell_worker
        self._tell_host = tell_host
        self._timeout_s = heartbeat_timeout_s
        self._interval_s = min(BEAT_S, heartbeat_timeout_s / BEATS_PER_TIMEOUT)
        self._ending: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._dumped: asyncio.Future[Dumped] = asyncio.get_running_loop().create_future()
        self._is_up = False  # once it was heard; the hub bounds the time until then
        self._is_heard = False  # since the last beat
        self._orders: set[asyncio.Task[None]] = set()  # kept, or they could vanish on their way

    async def ended(self) -> ProcessExit:
        """Keep it alive by beats until it has ended, or must be taken for dead."""
        silent_s = 0.0
        while not self._ending.done():
            self._is_heard = False
            try:
                await self._beat()
            except zmq.ZMQError:
                await self._told_within(self._interval_s)  # its host may know more
                self.told(ProcessExit(reason=f"lost its connection from {self.host}"))
                break
            await self._told_within(self._interval_s)
            # In beats, not by the clock: a controller that was busy has heard nobody.
            is_silent = self._is_up and not self._is_heard
            silent_s = silent_s + self._interval_s if is_silent else 0.0
            if silent_s >= self._timeout_s:
                self.kill()  # in case only its own threads hang
                reason = f"on {self.host} answered no heartbeat for {self._timeout_s} s"
                self.told(ProcessExit(reason=reason))
        return self._ending.result()

    def heard(self) -> None:
        """Any message came from it."""
        self._is_up = self._is_heard = True

    def told(self, ending: ProcessExit) -> None:
        """Its host says that it has ended."""
        if not self._ending.done():
            self._ending.set_result(ending)

    async def last_words(self) -> tuple[str, str]:
        """As of a process on this host; told by its own, if that answers."""
        self._order(DumpStacks(worker=self.name))
        await asyncio.wait({self._dumped, self._ending}, timeout=DUMP_TIMEOUT_S)
        if not self._dumped.done():
            return f"its log is on {self.host}", ""
        dumped = self._dumped.result()
        return f"{dumped.told} on {self.host}", dumped.log_tail

    def told_stacks(self, dumped: Dumped) -> None:
        """Its host has had it write its stacks."""
        if not self._dumped.done():
            self._dumped.set_result(dumped)

    def terminate(self) -> None:
        self._order(EndWorker(worker=self.name, kill=False))

    def kill(self) -> None:
        self._order(EndWorker(worker=self.name, kill=True))

    def log_tail(self) -> str:
        """Its log lies on its host; what the host tells of it comes with the ending."""
        return ""

    async def _beat(self) -> None:
        # The host hears it too: without beats it takes the controller for dead, and ends us all.
        await self._tell_host(Beat())
        if self._is_up:
            await self._tell_worker(Beat())

    async def _told_within(self, timeout_s: float) -> None:
        await asyncio.wait({self._ending}, timeout=timeout_s)

    def _order(self, message: EndWorker | DumpStacks) -> None:
        if self._ending.done():
            return
        task = asyncio.create_task(self._deliver(message), name=f"order-{self.name}")
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _deliver(self, message: EndWorker | DumpStacks) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the next beat finds the same, and says so
            await self._tell_host(message)
