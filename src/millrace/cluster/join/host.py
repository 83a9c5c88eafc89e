"""`millrace join`: brings workers from this host into a run whose controller is on another.

Promise: the workers started here end with this process, and with the controller: this process kills
them when it hears no beat for as long as the ticket says. How each ended is told to the controller
and returned. One asyncio loop in the main thread.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

import zmq
import zmq.asyncio

from millrace.cluster import address as addresses
from millrace.cluster.address import dial
from millrace.cluster.credentials import Credentials
from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.join.gate import host_identity
from millrace.cluster.join.ticket import JoinTicket
from millrace.cluster.link import EVENT_ID, read_frames
from millrace.cluster.messages import (
    Beat,
    Dumped,
    DumpStacks,
    Ended,
    EndWorker,
    Error,
    Join,
    JoinAdmitted,
    JoinPlace,
    Message,
)
from millrace.cluster.process import Process, describe_exit, start_worker
from millrace.cluster.wire import decode, encode
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.files import check_file_name

ANSWER_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0

Say = Callable[[str], None]


def join(ticket: JoinTicket, *, module: str, count: int, log_dir: Path, say: Say = print) -> None:
    """Start `count` workers of `python -m module` here; returns when the run has stopped them.

    Raises ConfigError when the run does not take them, RunFailed when one of them ended otherwise.
    """
    if count < 1:
        raise ConfigError(f"--count = {count} brings nobody; give 1 or more.")
    run_on_own_loop(lambda: _join(ticket, module=module, count=count, log_dir=log_dir, say=say))


async def _join(ticket: JoinTicket, *, module: str, count: int, log_dir: Path, say: Say) -> None:
    await _knock(ticket)
    async with _connected(ticket) as line:
        places = await line.ask_for(count)
        say(f"Joined the run at {ticket.address} with {', '.join(p.name for p in places)}.")
        await _HostWorkers(line, ticket=ticket).serve(places, module=module, log_dir=log_dir)
        say("The run has ended.")


async def _knock(ticket: JoinTicket) -> None:
    """Tell at once the commonest reasons why nobody will answer."""
    host, port = addresses.split(ticket.address)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        raise ConfigError(
            f"No run listens at {ticket.address} ({reason}): it has ended, or that address does not"
            " lead to it from this host; then set cluster.advertise of the run."
        ) from None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def _connected(ticket: JoinTicket) -> AsyncIterator["_Line"]:
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dial(
            dealer,
            ticket.address,
            identity=host_identity(ticket.token),
            keys=ticket.keys,
            heartbeat_timeout_s=ticket.heartbeat_timeout_s,
        )
        yield _Line(dealer)
    finally:
        context.destroy(linger=int(FLUSH_TIMEOUT_S * 1000))


class _Line:
    """This host's own connection to the hub, beside those of its workers."""

    def __init__(self, dealer: zmq.asyncio.Socket) -> None:
        self._dealer = dealer

    async def ask_for(self, count: int) -> list[JoinPlace]:
        await self.say(
            Join(host=socket.gethostname(), num_workers=count), id=secrets.token_bytes(8)
        )
        try:
            answer = await self.hear(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(
                "The run that listens there does not accept this ticket: it is of an earlier run;"
                " copy the new one."
            ) from None
        if isinstance(answer, Error):
            raise ConfigError(answer.reason)
        assert isinstance(answer, JoinAdmitted), answer
        return answer.places

    async def say(self, message: Message, *, id: bytes = EVENT_ID) -> None:
        await self._dealer.send_multipart([id, *encode(message)])

    async def hear(self, timeout_s: float) -> Message:
        async with asyncio.timeout(timeout_s):
            _id, *frames = read_frames(await self._dealer.recv_multipart(copy=False))
        return decode(frames)


class _HostWorkers:
    """The worker processes of this host."""

    def __init__(self, line: _Line, *, ticket: JoinTicket) -> None:
        self._line = line
        self._ticket = ticket
        self._processes: dict[str, Process] = {}
        self._watches: dict[str, asyncio.Task[int]] = {}  # exit codes, once they are told
        self._dumping: set[asyncio.Task[None]] = set()  # kept, or they could vanish on their way

    async def serve(self, places: list[JoinPlace], *, module: str, log_dir: Path) -> None:
        """Start a worker for each place; returns when all have ended as the controller wished."""
        obeying = asyncio.create_task(self._obey(), name="obey")
        try:
            for place in places:
                check_file_name(place.name, of="A worker of this run")  # the controller's word
                await self._start(place, module=module, log=log_dir / f"{place.name}.log")
            watching = asyncio.gather(*self._watches.values())
            await asyncio.wait({obeying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if obeying.done():
                obeying.result()  # raises: it ends in no other way
            codes = await watching
        finally:
            obeying.cancel()
            await self._disband(at_once=obeying.done())
        for process, code in zip(self._processes.values(), codes, strict=True):
            if code != 0:
                raise RunFailed(f"A worker {describe_exit(code)}; its log is {process.log}.")

    async def _start(self, place: JoinPlace, *, module: str, log: Path) -> None:
        process = await start_worker(
            place.name,
            module,
            address=self._ticket.address,
            credentials=Credentials(token=place.token, keys=self._ticket.keys),
            log=log,
            heartbeat_timeout_s=self._ticket.heartbeat_timeout_s,
        )
        self._processes[place.name] = process
        self._watches[place.name] = asyncio.create_task(self._watch(place.name, process))

    async def _obey(self) -> NoReturn:
        """Hear the controller; raises RunFailed when there is no controller to be heard."""
        timeout_s = self._ticket.heartbeat_timeout_s
        while True:
            try:
                message = await self._line.hear(timeout_s)
            except TimeoutError:
                raise RunFailed(
                    f"The controller at {self._ticket.address} was silent for {timeout_s} s;"
                    " the workers of this host were ended."
                ) from None
            match message:
                case EndWorker(worker=worker, kill=kill) if worker in self._processes:
                    process = self._processes[worker]
                    end = process.kill if kill else process.terminate
                    end()
                case DumpStacks(worker=worker) if worker in self._processes:
                    dumping = asyncio.create_task(self._dump(worker, self._processes[worker]))
                    self._dumping.add(dumping)
                    dumping.add_done_callback(self._dumping.discard)
                case _:
                    assert isinstance(message, Beat | EndWorker | DumpStacks), message

    async def _dump(self, name: str, process: Process) -> None:
        told, log_tail = await process.last_words()
        await self._line.say(Dumped(worker=name, told=told, log_tail=log_tail))

    async def _watch(self, name: str, process: Process) -> int:
        code = await process.wait()
        ended = Ended(
            worker=name,
            reason=f"{describe_exit(code)}; its log is {process.log.absolute()}",
            log_tail=process.log_tail(),
            may_have_spoken=code >= 0,
        )
        with contextlib.suppress(TimeoutError):  # the controller is gone, and needs no telling
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._line.say(ended)
        return code

    async def _disband(self, *, at_once: bool) -> None:
        """End what still runs."""
        watches = self._watches.values()
        try:
            if watches and not at_once:
                for process in self._processes.values():
                    process.terminate()
                await asyncio.wait(watches, timeout=STOP_TIMEOUT_S)
        finally:
            for process in self._processes.values():
                process.kill()
            if watches:
                await asyncio.wait(watches)
