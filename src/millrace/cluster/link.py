"""The worker's side of the connection: its link to the controller, from start to exit.

Every worker module ends with run_module() under its __main__.

Promise: messages are sent in the order of the calls. What was sent before close() is on the wire
before the process ends. A start that fails is answered with its error, and the worker waits for
another. A worker that fails later sends the reason before it exits.

Threads: an IO thread owns the DEALER socket. reply, fail and emit may be called from any thread;
receive from one. Bounds: an outbox of OUTBOX_MESSAGES; when the controller stops reading, reply and
emit block. The inbox is bounded by the controller, which waits for a reply to all that it sends.
"""

import argparse
import contextlib
import faulthandler
import io
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import zmq

from millrace.cluster import messages
from millrace.cluster.address import Credentials, connect, free_port, own_address
from millrace.cluster.parent_death import exit_with_parent
from millrace.cluster.wire import Decoder, Frame, WireError, encode, message_decoder
from millrace.core.errors import MillraceError, printable
from millrace.core.spans import Timeline

# Ends a worker cleanly. Not SIGTERM: systemd and some settings of SLURM send that to every process
# of a job, whose controller then needs its workers to write a checkpoint.
END_SIGNAL = signal.SIGUSR2
OUTBOX_MESSAGES = 64
FLUSH_TIMEOUT_S = 10.0
EVENT_ID = bytes(8)  # call id of a message that is no reply
_CLOSE = b""
StartMessage = TypeVar("StartMessage", bound=messages.Message)


def identity_of(name: str, *, token: str) -> bytes:
    """Routing id of a worker. The token prevents one worker from posing as another."""
    return f"{name}:{token}".encode()


def read_frames(frames: list[zmq.Frame]) -> list[Frame]:
    """Received frames, ready to decode. Small ones are copied: a small zmq frame is an unaligned
    slice of a receive buffer and would keep that buffer alive."""
    return [frame.buffer if len(frame) >= zmq.COPY_THRESHOLD else frame.bytes for frame in frames]


class WorkerCall:
    """One message from the controller. It needs exactly one reply, from any thread."""

    def __init__(self, message: messages.Message, *, link: "Link", id: bytes) -> None:
        self.message = message
        self._link = link
        self._id = id
        self._is_open = threading.Lock()  # taken by the first reply

    def reply(self, message: messages.Message | None = None) -> None:
        """Send the reply; by default Done."""
        if not self._is_open.acquire(blocking=False):
            raise AssertionError(f"{type(self.message).__name__} was replied to twice")
        try:
            self._link._send(self._id, message if message is not None else messages.Done())
        except WireError:
            self._is_open.release()  # fail() can still report it
            raise

    def send_part(self, part: messages.Part) -> None:
        """Send a part before the reply, from the thread that will reply."""
        assert not self._is_open.locked(), "parts precede the reply"
        self._link._send(self._id, part)

    def fail(self, error: BaseException) -> None:
        """Reply with an error; the worker continues."""
        self.reply(_as_message(error))


class Link:
    """The connection of one worker to the controller; its first message is Hello."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        credentials: Credentials | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        """`heartbeat_timeout_s` is for a worker on another host than the controller."""
        credentials = credentials or Credentials()
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[WorkerCall | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()  # one sender at a time on the outbox
        self._closed = False
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.set_hwm(OUTBOX_MESSAGES)
        self._outbox.bind("inproc://outbox")
        outgoing = self._context.socket(zmq.PAIR)
        outgoing.set_hwm(OUTBOX_MESSAGES)
        outgoing.connect("inproc://outbox")
        dealer = self._context.socket(zmq.DEALER)
        connect(
            dealer,
            address,
            identity=identity_of(name, token=credentials.token),
            keys=credentials.keys,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self._thread = threading.Thread(
            target=self._move, args=(dealer, outgoing), name="link", daemon=True
        )
        self._thread.start()
        self.address = own_address(address)
        """Of this host, on its route to the controller."""
        port = free_port(self.address)
        self.emit(
            messages.Hello(worker=name, pid=os.getpid(), address=self.address, free_port=port)
        )

    def receive(self, timeout_s: float | None = None) -> WorkerCall | None:
        """The next call; None if none arrives in time. 0 polls, None waits without limit."""
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._inbox.put(item)  # the link stays broken
            raise item
        return item

    def emit(self, message: messages.Message) -> None:
        """Send a message that is no reply."""
        self._send(EVENT_ID, message)

    def close(self) -> None:
        """Send everything, waiting at most FLUSH_TIMEOUT_S, and disconnect."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # A full outbox means that the controller reads nothing: the join below times out.
            with contextlib.suppress(zmq.Again):
                self._outbox.setsockopt(zmq.SNDTIMEO, int(FLUSH_TIMEOUT_S * 1000))
                self._outbox.send(_CLOSE)
        self._thread.join(FLUSH_TIMEOUT_S)
        if not self._thread.is_alive():
            self._outbox.close(linger=0)
            self._context.term()  # waits for the dealer to send everything, up to its linger

    def _send(self, id: bytes, message: messages.Message) -> None:
        frames = encode(message)
        with self._lock:
            if self._closed:
                raise WireError(f"The link is closed; {type(message).__name__} was not sent.")
            self._outbox.send_multipart([id, *frames], copy=False)

    def _move(self, dealer: zmq.Socket, outgoing: zmq.Socket) -> None:
        """Body of the IO thread."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(outgoing, zmq.POLLIN)
        decoder = message_decoder()
        try:
            while True:
                ready = dict(poller.poll())
                if dealer in ready:
                    self._deliver(dealer.recv_multipart(copy=False), decoder, dealer)
                if outgoing in ready:
                    frames = outgoing.recv_multipart(copy=False)
                    if len(frames) == 1:
                        break
                    dealer.send_multipart(frames, copy=False)
        except BaseException as error:  # noqa: BLE001 - raised again by receive()
            self._inbox.put(error)
        finally:
            outgoing.close(linger=0)
            dealer.close(linger=int(FLUSH_TIMEOUT_S * 1000))

    def _deliver(
        self, frames: list[zmq.Frame], decoder: Decoder[messages.Message], dealer: zmq.Socket
    ) -> None:
        id, *rest = read_frames(frames)
        try:
            message = decoder.decode(rest)
        except WireError as error:
            dealer.send_multipart([id, *encode(_as_message(error))], copy=False)
            return
        if isinstance(message, messages.Heartbeat):  # answered here: the main thread may be busy
            dealer.send_multipart([EVENT_ID, *encode(message)])
            return
        self._inbox.put(WorkerCall(message, link=self, id=bytes(id)))


def _as_message(error: BaseException) -> messages.Error:
    reason, kind = str(error), type(error).__name__
    return messages.Error(
        kind=kind,
        reason=_encodable(reason) or kind,
        traceback=_encodable("".join(traceback.format_exception(error))),
    )


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs: an error may quote what a model has written."""
    return text.encode(errors="backslashreplace").decode()


class WorkerLoop(Protocol):
    def serve(self) -> None:
        """Answer calls until Stop."""


def serve(
    link: Link,
    name: str,
    *,
    message: type[StartMessage],
    start: Callable[[StartMessage, Link, Timeline], WorkerLoop],
) -> None:
    """Call `start` with each message of this type until one does not fail; serve until Stop."""
    timeline = Timeline(name, name="load", busy=True)
    while True:
        timeline.enter("no work", busy=False)
        call = link.receive(None)
        assert call is not None
        if isinstance(call.message, messages.Stop):
            call.reply()
            return
        if not isinstance(call.message, message):
            call.fail(unexpected(call, reason=f"it expects {message.__name__} first"))
            continue
        timeline.enter("load", busy=True)
        link.emit(messages.WorkerProgress(spans=timeline.drain(), counters={}))
        try:
            loop = start(call.message, link, timeline)
        except Exception as error:  # noqa: BLE001 - raised again in the controller
            call.fail(error)
            continue
        call.reply()
        loop.serve()
        return


def unexpected(call: WorkerCall, *, reason: str = "it is running") -> MillraceError:
    return MillraceError(f"A worker cannot handle {type(call.message).__name__} now: {reason}.")


class _LogStream(io.TextIOWrapper):
    """Standard output or error of a worker, which is a log that a user reads in a terminal."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)


def run_worker(main: Callable[[Link, str], None]) -> NoReturn:
    """Run `main(link, name)` as this process. END_SIGNAL raises SystemExit in main."""
    os.umask(0o077)  # checkpoints are the user's alone
    for name in ("stdout", "stderr"):
        log = getattr(sys, name).buffer
        setattr(sys, name, _LogStream(log, "utf-8", "backslashreplace", line_buffering=True))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # writes all stacks to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    signal.signal(signal.SIGTERM, lambda *_: None)  # likewise; programs it starts do not ignore it
    signal.signal(END_SIGNAL, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        description="A Millrace worker; the controller or `millrace join` starts it."
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True, help="where the controller listens")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid of the parent")
    parser.add_argument(
        "--heartbeat-timeout", type=float, help="seconds; for a controller on another host"
    )
    options = parser.parse_args()
    exit_with_parent(options.parent)
    link = Link(
        options.address,
        name=options.name,
        credentials=Credentials.take(os.environ),
        heartbeat_timeout_s=options.heartbeat_timeout,
    )
    try:
        main(link, options.name)
    except Exception as error:  # noqa: BLE001 - reported to the controller
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        reason, trace = _encodable(reason), _encodable(traceback.format_exc())
        # If the link itself broke, the controller has the log and the exit code.
        with contextlib.suppress(WireError):
            link.emit(messages.Failed(reason=reason, traceback=trace))
        sys.exit(1)
    finally:
        link.close()
    sys.exit(0)


def run_module(
    message: type[StartMessage], start: Callable[[StartMessage, Link, Timeline], WorkerLoop]
) -> NoReturn:
    """Run a worker module as this process; the arguments are those of serve()."""
    run_worker(partial(serve, message=message, start=start))
