"""A worker's connection to the controller.

Promise: messages are sent in the order of the calls, from any thread. What was sent before close()
is on the wire before the process ends.

Threads: an IO thread owns the DEALER socket. reply, fail and emit may be called from any thread;
receive from one. Bounds: outgoing messages wait in an outbox of OUTBOX_MESSAGES, then in the
socket; when the controller stops reading, reply and emit block. The inbox has no bound of its own,
because the controller waits for a reply to everything it sends.
"""

import contextlib
import os
import queue
import threading
import traceback

import zmq

from millrace.cluster.address import connect
from millrace.cluster.credentials import Credentials
from millrace.cluster.messages import Done, Error, Heartbeat, Hello, Message, Part
from millrace.cluster.wire import Decoder, Frame, WireError, encode, message_decoder

OUTBOX_MESSAGES = 64
FLUSH_TIMEOUT_S = 10.0
EVENT_ID = bytes(8)  # call id of a message that is no reply
_CLOSE = b""


def identity_of(name: str, *, token: str) -> bytes:
    """Routing id of a worker. The token prevents one worker from posing as another."""
    return f"{name}:{token}".encode()


def read_frames(frames: list[zmq.Frame]) -> list[Frame]:
    """Received frames, ready to decode: large ones as they are, small ones copied.

    A small zmq frame is an unaligned slice of a receive buffer and would keep that buffer alive.
    """
    return [frame.buffer if len(frame) >= zmq.COPY_THRESHOLD else frame.bytes for frame in frames]


class WorkerCall:
    """One message from the controller. It needs exactly one reply, from any thread."""

    def __init__(self, message: Message, *, link: "Link", id: bytes) -> None:
        self.message = message
        self._link = link
        self._id = id
        self._is_open = threading.Lock()  # taken by the first reply

    def reply(self, message: Message | None = None) -> None:
        """Send the reply; by default Done."""
        if not self._is_open.acquire(blocking=False):
            raise AssertionError(f"{type(self.message).__name__} was replied to twice")
        self._link._send(self._id, message if message is not None else Done())

    def send_part(self, part: Part) -> None:
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
        self.emit(Hello(worker=name, pid=os.getpid()))

    def receive(self, timeout_s: float | None = None) -> WorkerCall | None:
        """The next call; None if none arrives in time. 0 polls, None waits without limit."""
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

    def _send(self, id: bytes, message: Message) -> None:
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
        self, frames: list[zmq.Frame], decoder: Decoder[Message], dealer: zmq.Socket
    ) -> None:
        id, *rest = read_frames(frames)
        try:
            message = decoder.decode(rest)
        except WireError as error:
            dealer.send_multipart([id, *encode(_as_message(error))], copy=False)
            return
        if isinstance(message, Heartbeat):  # answered here: the main thread may be busy
            dealer.send_multipart([EVENT_ID, *encode(message)])
            return
        self._inbox.put(WorkerCall(message, link=self, id=bytes(id)))


def _as_message(error: BaseException) -> Error:
    return Error(
        kind=type(error).__name__,
        reason=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
    )
