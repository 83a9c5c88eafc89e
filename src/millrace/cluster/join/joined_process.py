"""The process of a worker on another host, as far as the controller can observe it.

No signal reaches it, and its exit status is unknown here. Its end shows in one of three ways: its
host reports it, its connection is gone when the next heartbeat is sent, or it does not answer
heartbeats for too long.

Promise: one of the three happens, so exited() returns.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import zmq

from millrace.cluster.messages import Heartbeat, Message, ProcessExit, SignalWorker

MAX_INTERVAL_S = 1.0  # between two heartbeats
MIN_BEATS_PER_TIMEOUT = 4
DUMP_TIMEOUT_S = 5.0  # for a host to dump the stacks of a worker and report its end

Send = Callable[[Message], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class JoinedProcess:
    """Created by the registry when a host is admitted. Runs on the controller's event loop."""

    name: str
    host: str
    send_to_worker: Send
    send_to_host: Send
    heartbeat_timeout_s: float

    def __post_init__(self) -> None:
        self._interval_s = min(MAX_INTERVAL_S, self.heartbeat_timeout_s / MIN_BEATS_PER_TIMEOUT)
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._is_connected = False  # after its first message; the hub limits the time until then
        self._has_answered = False  # since the last heartbeat
        self._sending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def exited(self) -> ProcessExit:
        """Send heartbeats until the process has ended or counts as dead."""
        silent_s = 0.0
        while not self._exit.done():
            self._has_answered = False
            try:
                # To the host as well: without heartbeats it takes the controller for dead.
                await self.send_to_host(Heartbeat())
                if self._is_connected:
                    await self.send_to_worker(Heartbeat())
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

    def on_message(self) -> None:
        """A message of the worker has arrived."""
        self._is_connected = self._has_answered = True

    def on_exit(self, exit: ProcessExit) -> None:
        """The host reports that the worker has ended."""
        if not self._exit.done():
            self._exit.set_result(exit)

    async def dump_stacks(self) -> tuple[str, str]:
        """As of a process on this host, if its host answers; the host kills the worker, too."""
        self._signal("abort")
        await self._wait_for_exit(DUMP_TIMEOUT_S)
        if not self._exit.done():
            return f"its log is on {self.host}", ""
        return self._exit.result().reason, self._exit.result().log_tail

    def terminate(self) -> None:
        self._signal("terminate")

    def kill(self) -> None:
        self._signal("kill")

    def log_tail(self) -> str:
        """Its log is on its host, which sends the end of it with the exit."""
        return ""

    async def _wait_for_exit(self, timeout_s: float) -> None:
        await asyncio.wait({self._exit}, timeout=timeout_s)

    def _signal(self, action: Literal["terminate", "kill", "abort"]) -> None:
        if self._exit.done():
            return
        message = SignalWorker(worker=self.name, action=action)
        task = asyncio.create_task(self._send_signal(message), name=f"{action}-{self.name}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_signal(self, message: SignalWorker) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the next heartbeat fails alike and reports it
            await self.send_to_host(message)
