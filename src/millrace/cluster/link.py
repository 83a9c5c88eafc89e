"""A worker's end of the wire, and the life of a worker from its command line to its last message.

Promise: messages leave in the order they were handed over, from any thread; what was handed over
before close() is on the wire before the process ends. A worker that ends by itself says why.

Threads: an IO thread owns the DEALER socket. reply, fail and emit may be called from any thread;
receive from one. Bounds: what goes out waits in an outbox of OUTBOX_MESSAGES, then in the socket;
when the controller stops reading, reply and emit block. What comes in waits unbounded here, because
the controller bounds it: it waits for a reply to everything it sends.
"""

import argparse
import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import zmq

from millrace.cluster.address import dial
from millrace.cluster.credentials import Credentials
from millrace.cluster.lifeline import die_with
from millrace.cluster.messages import Beat, Done, Error, Failed, Hello, Message, Part
from millrace.cluster.wire import Decoder, Frame, WireError, encode, message_decoder

OUTBOX_MESSAGES = 64
FLUSH_TIMEOUT_S = 10.0
EVENT_ID = bytes(8)  # call id of a message that answers nothing
_CLOSE = b""


def identity_of(name: str, *, token: str) -> bytes:
    """A worker's routing id. The token keeps one worker from posing as another."""
    return f"{name}:{token}".encode()


def read_frames(frames: list[zmq.Frame]) -> list[Frame]:
    """What a socket received, ready to decode: large frames as they are, small ones copied.

    A small zmq frame is an unaligned slice of a receive buffer and would keep all of it alive.
    """
    return [frame.buffer if len(frame) >= zmq.COPY_THRESHOLD else frame.bytes for frame in frames]


class WorkerCall:
    """One message from the controller; wants exactly one reply, from any thread."""

    def __init__(self, message: Message, *, link: "Link", id: bytes) -> None:
        self.message = message
        self._link = link
        self._id = id
        self._is_open = threading.Lock()  # taken by the first reply

    def reply(self, message: Message | None = None) -> None:
        """Answer; without a message: Done."""
        if not self._is_open.acquire(blocking=False):
            raise AssertionError(f"{type(self.message).__name__} was replied to twice")
        self._link._send(self._id, message if message is not None else Done())

    def tell(self, part: Part) -> None:
        """Say something before the reply; by the thread that will reply."""
        assert not self._is_open.locked(), "a part comes before the reply"
        self._link._send(self._id, part)

    def fail(self, error: BaseException) -> None:
        """Answer that this call failed; the worker goes on."""
        self.reply(_as_message(error))


class Link:
    """The connection of one worker to the controller; says Hello when it is made."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        credentials: Credentials | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        """`heartbeat_timeout_s` is for a worker on another host than the controller's."""
        credentials = credentials or Credentials()
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[WorkerCall | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()  # one sender at a time on the outbox
        self._closed = False
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.set_hwm(OUTBOX_MESSAGES)
        self._outbox.bind("inproc://outbox")
        outlet = self._context.socket(zmq.PAIR)
        outlet.set_hwm(OUTBOX_MESSAGES)
        outlet.connect("inproc://outbox")
        dealer = self._context.socket(zmq.DEALER)
        dial(
            dealer,
            address,
            identity=identity_of(name, token=credentials.token),
            keys=credentials.keys,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self._thread = threading.Thread(
            target=self._move, args=(dealer, outlet), name="link", daemon=True
        )
        self._thread.start()
        self.emit(Hello(worker=name, pid=os.getpid()))

    def receive(self, timeout_s: float | None = None) -> WorkerCall | None:
        """The next call; None if there was none in time. 0 polls, None waits for ever."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                item = self._inbox.get_nowait()
            else:
                item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._inbox.put(item)  # the link stays broken
            raise item
        return item

    def emit(self, message: Message) -> None:
        """Tell the controller something it did not ask for."""
        self._send(EVENT_ID, message)

    def close(self) -> None:
        """Put everything on the wire, waiting at most FLUSH_TIMEOUT_S, and disconnect."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # A full outbox means that the controller reads nothing: then the wait below ends it.
            with contextlib.suppress(zmq.Again):
                self._outbox.setsockopt(zmq.SNDTIMEO, int(FLUSH_TIMEOUT_S * 1000))
                self._outbox.send(_CLOSE)
        self._thread.join(FLUSH_TIMEOUT_S)
        if not self._thread.is_alive():
            self._outbox.close(linger=0)
            self._context.term()  # returns once the dealer has flushed, or its linger is over

    def _send(self, id: bytes, message: Message) -> None:
        frames = encode(message)
        with self._lock:
            if self._closed:
                raise WireError(f"The link is closed; {type(message).__name__} was not sent.")
            self._outbox.send_multipart([id, *frames], copy=False)

    def _move(self, dealer: zmq.Socket, outlet: zmq.Socket) -> None:
        """Body of the IO thread."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(outlet, zmq.POLLIN)
        decoder = message_decoder()
        try:
            while True:
                ready = dict(poller.poll())
                if dealer in ready:
                    self._deliver(dealer.recv_multipart(copy=False), decoder, dealer)
                if outlet in ready:
                    frames = outlet.recv_multipart(copy=False)
                    if len(frames) == 1:
                        break
                    dealer.send_multipart(frames, copy=False)
        except BaseException as error:  # noqa: BLE001 - raised again by receive()
            self._inbox.put(error)
        finally:
            outlet.close(linger=0)
            dealer.close(linger=int(FLUSH_TIMEOUT_S * 1000))

    def _deliver(
        self, frames: list[zmq.Frame], decoder: Decoder[Message], dealer: zmq.Socket
    ) -> None:
        id, *rest = read_frames(frames)
        try:
            message = decoder.decode(rest)
        except WireError as error:
            dealer.send_multipart([id, *encode(_as_message(error))], copy=False)
            return
        if isinstance(message, Beat):  # answered here: the main thread may be deep in its work
            dealer.send_multipart([EVENT_ID, *encode(message)])
            return
        self._inbox.put(WorkerCall(message, link=self, id=bytes(id)))


def _as_message(error: BaseException) -> Error:
    return Error(
        kind=type(error).__name__,
        reason=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )


def run_worker(main: Callable[[Link, str], None]) -> NoReturn:
    """Run `main(link, name)` as this process; all that stands under a worker module's __main__.

    Ctrl-C is the controller's business: SIGINT is ignored here. SIGTERM raises SystemExit in main.
    SIGUSR1 has the stacks of all threads written to the log, whatever they do.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    options = _parse(sys.argv[1:])
    die_with(options.parent)
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
        # The link itself may be what broke; then the log and the exit code tell the controller.
        with contextlib.suppress(WireError):
            link.emit(Failed(reason=reason, traceback=traceback.format_exc()))
        sys.exit(1)
    finally:
        link.close()
    sys.exit(0)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A Millrace worker; the controller or `millrace join` starts it."
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True, help="where the controller listens")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid of who started it")
    parser.add_argument("--heartbeat-timeout", type=float, help="of a controller on another host")
    return parser.parse_args(argv)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
