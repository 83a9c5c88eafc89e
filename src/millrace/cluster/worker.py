"""The controller's handle of one worker: calls, death and stopping.

Promise: every call ends with its reply, its timeout, or the death of the worker.
Runs on the controller's event loop.
"""

import asyncio
import contextlib
import itertools
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from millrace.cluster.launchers.launcher import HostDevice, WorkerProcess
from millrace.cluster.link import EVENT_ID
from millrace.cluster.messages import Error, Failed, Hello, Message, Part, Stop, WorkerProgress
from millrace.cluster.supervision.watchdog import ProgressWatchdog
from millrace.core import errors
from millrace.core.errors import ConfigError, MillraceError, WorkerError

DRAIN_S = 0.2  # for messages that a worker sent before it exited

Send = Callable[[bytes, Message], Awaitable[None]]  # call id, message
OnPart = Callable[[Part], None]
Reply = asyncio.Future[Message | WorkerError]


class Worker:
    """Created by the hub, which calls start, on_reply, on_event and fail."""

    def __init__(self, name: str, *, send: Send, stop_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.dead: asyncio.Future[WorkerError] = loop.create_future()
        """Set when the worker has failed, died or been stopped; calls fail from then on."""
        self.watchdog = ProgressWatchdog()
        self._send = send
        self._stop_timeout_s = stop_timeout_s
        self._process = WorkerProcess()  # a placeholder before its start
        self._gone: asyncio.Task[None] | None = None  # done = the process has ended
        self._connected: asyncio.Future[Hello] = loop.create_future()
        self._ids = itertools.count(1)  # 0 is the id of events
        self._waiting: dict[bytes, tuple[Reply, OnPart | None]] = {}  # by call id
        self._is_stopping = False
        self._is_hung = False  # fail_hung() reports the reason

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def log(self) -> Path | None:
        return self._process.log

    @property
    def host(self) -> str | None:
        return self._process.host

    @property
    def devices(self) -> tuple[HostDevice, ...]:
        """Devices on another host, as that host has chosen them."""
        return self._process.devices

    @property
    def free_address(self) -> tuple[str, int]:
        """Address of its host, as other hosts of the run may reach it, and a port there that was
        free when the worker started."""
        hello = self._connected.result()
        return hello.address, hello.free_port

    @property
    def is_stopped(self) -> bool:
        """True while its process on this host is stopped by SIGSTOP."""
        return self._process.is_stopped

    @property
    def is_gone(self) -> bool:
        """True once its process has ended."""
        return self._gone is not None and self._gone.done()

    async def call(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        kill_on_timeout: bool = False,
        expect_progress: bool = False,
        on_part: OnPart | None = None,
    ) -> Message:
        """Send a message and wait for its reply; calls may overlap.

        `expect_progress`: the worker reports progress until it replies, so `watchdog` may find
        that it hangs. `on_part` gets the parts before the reply; an error in it ends the call.
        Raises the worker's own error if it is one of Millrace's; WorkerError for any other, and
        when the worker dies or does not answer in time.
        """
        if self.dead.done():
            raise _copy(self.dead.result())
        what = type(message).__name__
        call_id = next(self._ids).to_bytes(8, "big")
        reply = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = reply, on_part
        expecting = self.watchdog.expect_progress() if expect_progress else contextlib.nullcontext()
        try:
            with expecting:
                await self._send(call_id, message)
                async with asyncio.timeout(timeout_s):
                    answer = await reply
        except TimeoutError:
            reason = f"did not answer {what} within {timeout_s} s"
            if kill_on_timeout:
                await self.fail_hung(reason)
                raise _copy(self.dead.result()) from None
            raise self._error(reason) from None
        except zmq.ZMQError as error:
            raise self._error(f"cannot be reached for {what}: {error}") from None
        finally:
            del self._waiting[call_id]
        if isinstance(answer, WorkerError):
            raise answer
        if isinstance(answer, Error):
            raise self._raised(what, answer)
        return answer

    async def emit(self, message: Message) -> None:
        """Send a message that has no reply; a worker that cannot be reached is about to fail."""
        with contextlib.suppress(zmq.ZMQError):
            await self._send(EVENT_ID, message)

    async def start_as(self, message: Message, *, timeout_s: float) -> None:
        """Send the message that makes it load and serve; a worker that cannot is ended."""
        try:
            await self.call(message, timeout_s=timeout_s)
        except ConfigError:
            await self.stop()  # the process is healthy; its settings are wrong
            raise
        except BaseException:
            self.kill()
            raise

    async def stop(self) -> None:
        """Send Stop; after half of the time limit send END_SIGNAL; then kill it."""
        self._is_stopping = True
        half_s = self._stop_timeout_s / 2
        if self._connected.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(half_s):
                    with contextlib.suppress(MillraceError):
                        await self.call(Stop())
                    await self.is_gone_within(None)
                    return
        self._process.terminate()
        if not await self.is_gone_within(half_s):
            self.kill()
            await self.is_gone_within(None)

    async def fail_hung(self, reason: str) -> None:
        """Kill a hung worker after it has dumped its stacks; `reason` follows "Worker 'NAME'"."""
        if self.dead.done():
            return
        self._is_hung = True
        outcome, log_tail = "its stacks may not be in its log", ""
        try:
            outcome, log_tail = await self._process.dump_stacks()
        finally:  # also when the caller is cancelled meanwhile
            self._end(self._error(f"{reason}; {outcome}", traceback=log_tail))
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL. Calls that wait fail as soon as the system reports the death."""
        self._process.kill()

    async def is_gone_within(self, timeout_s: float | None) -> bool:
        if self._gone is None:
            return True
        await asyncio.wait({self._gone}, timeout=timeout_s)
        return self._gone.done()

    async def start(self, process: WorkerProcess, *, timeout_s: float) -> None:
        """Wait for the Hello of the worker that runs in this process."""
        self._process = process
        if self._is_stopping:  # stop() was called meanwhile
            self.kill()
        self._gone = asyncio.create_task(self._wait_for_exit(process), name=f"wait-{self.name}")
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({self._connected, self.dead}, timeout=timeout_s, return_when=first)
        if self.dead.done():
            raise _copy(self.dead.result())
        if not self._connected.done():
            tail = process.log_tail()
            raise self._error(f"did not come up within {timeout_s} s", traceback=tail)

    def on_reply(self, call_id: bytes, message: Message) -> bool:
        """Pass a reply or a part to its call; False if that call has ended."""
        self._process.on_message()
        reply, on_part = self._waiting.get(call_id, (None, None))
        is_part = isinstance(message, Part)
        if reply is None or reply.done() or (is_part and on_part is None):
            return False
        if not is_part:
            reply.set_result(message)
        elif on_part is not None:
            try:
                on_part(message)
            except Exception as error:  # noqa: BLE001 - raised by call()
                reply.set_exception(error)
        return True

    def on_event(self, message: Message) -> None:
        """Handle a message that is no reply."""
        self._process.on_message()
        if isinstance(message, Hello) and not self._connected.done():
            self._connected.set_result(message)
        elif isinstance(message, WorkerProgress):
            self.watchdog.report(work=message.work, waits=message.waits)
        elif isinstance(message, Failed):
            self._end(self._error(f"failed: {message.reason}", traceback=message.traceback))
            # It is about to exit; one of its threads must not prevent that.
            asyncio.get_running_loop().call_later(self._stop_timeout_s, self.kill)

    def fail(self, reason: str, *, error: BaseException) -> None:
        """Kill the worker because of an error in the controller."""
        self._end(self._error(reason, traceback="".join(traceback.format_exception(error))))
        self.kill()

    async def _wait_for_exit(self, process: WorkerProcess) -> None:
        exited = await process.exited()
        is_awaited = not self.dead.done() and (self._waiting or not self._is_stopping)
        if is_awaited and exited.code is not None and exited.code >= 0:
            await asyncio.sleep(DRAIN_S)
        if self._is_stopping:
            self._end(self._error("was stopped"))
        elif not self._is_hung:
            error = self._error(exited.reason, traceback=exited.log_tail)
            error.was_killed = exited.code is not None and exited.code < 0
            self._end(error)

    def _end(self, error: WorkerError) -> None:
        if self.dead.done():
            return
        self.dead.set_result(error)
        for reply, _ in self._waiting.values():
            if not reply.done():
                reply.set_result(_copy(error))

    def _error(self, reason: str, *, traceback: str = "") -> WorkerError:
        return WorkerError(f"Worker {self.name!r} {reason}.", worker=self.name, traceback=traceback)

    def _raised(self, what: str, answer: Error) -> MillraceError:
        """The exception of the worker, to be raised here."""
        cls = getattr(errors, answer.kind, None)
        if not (isinstance(cls, type) and issubclass(cls, MillraceError)) or cls is WorkerError:
            reason = f"failed at {what}: {answer.kind}: {answer.reason.rstrip('.')}"
            return self._error(reason, traceback=answer.traceback)
        error = cls(answer.reason)
        error.add_note(answer.traceback)
        return error


def _copy(error: WorkerError) -> WorkerError:
    """A copy for each call that raises it, because exceptions collect traceback frames."""
    return WorkerError(
        str(error), worker=error.worker, traceback=error.traceback, was_killed=error.was_killed
    )
