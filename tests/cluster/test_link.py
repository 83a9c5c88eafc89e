import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from millrace.cluster.link import EVENT_ID, Link
from millrace.cluster.messages import Done, Error, Hello, Message, Release, WorkerProgress
from millrace.cluster.wire import WireError, decode, encode


class Controller:
    """The other end of the wire, frame by frame."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.bind(address)
        self.peer = b""

    def hear(self) -> tuple[bytes, Message]:
        self.peer, call_id, *frames = self.socket.recv_multipart()
        return call_id, decode(frames)

    def say(self, call_id: bytes, *frames: bytes | memoryview) -> None:
        self.socket.send_multipart([self.peer, call_id, *frames])


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(f"ipc://{tmp_path}/hub")
    yield controller
    controller.context.destroy(linger=0)


@pytest.fixture
def link(controller: Controller) -> Iterator[Link]:
    link = Link(controller.socket.getsockopt_string(zmq.LAST_ENDPOINT), name="worker-0")
    call_id, hello = controller.hear()
    assert call_id == EVENT_ID
    assert isinstance(hello, Hello)
    yield link
    link.close()


def test_receive_polls_or_waits_with_or_without_a_limit(controller: Controller, link: Link):
    assert link.receive(0) is None
    assert link.receive(0.02) is None
    controller.say(b"call-001", *encode(Release(version=3)))
    call = link.receive(None)
    assert call is not None
    assert call.message == Release(version=3)


def test_replies_carry_the_id_of_their_call_in_any_order(controller: Controller, link: Link):
    for number in (b"call-001", b"call-002"):
        controller.say(number, *encode(Release(version=int(number[-1:]))))
    first, second = link.receive(5), link.receive(5)
    assert first is not None
    assert second is not None
    second.reply()
    first.fail(ValueError("no such version"))
    assert controller.hear() == (b"call-002", Done())
    call_id, error = controller.hear()
    assert call_id == b"call-001"
    assert isinstance(error, Error)
    assert (error.kind, error.reason) == ("ValueError", "no such version")


def test_second_reply_raises(controller: Controller, link: Link):
    controller.say(b"call-001", *encode(Release(version=1)))
    call = link.receive(5)
    assert call is not None
    call.reply()
    with pytest.raises(AssertionError, match="Release was replied to twice"):
        call.reply()


def test_a_call_that_cannot_be_decoded_is_answered_with_an_error(
    controller: Controller, link: Link
):
    controller.say(b"call-001", b"\xc1")
    call_id, error = controller.hear()
    assert call_id == b"call-001"
    assert isinstance(error, Error)
    assert error.kind == "WireError"
    assert link.receive(0) is None


def test_error_may_quote_half_of_a_surrogate_pair(controller: Controller, link: Link):
    controller.say(b"call-001", *encode(Release(version=3)))
    call = link.receive(5)
    assert call is not None
    call.fail(ValueError("cannot read a\ud83d"))
    call_id, error = controller.hear()
    assert call_id == b"call-001"
    assert isinstance(error, Error)
    assert error.reason == r"cannot read a\ud83d"
    assert "ValueError" in error.traceback


def test_many_threads_may_emit_at_once(controller: Controller, link: Link):
    def emit(thread: int) -> None:
        for number in range(100):
            link.emit(WorkerProgress(spans=[], counters={str(thread): number}))

    threads = [threading.Thread(target=emit, args=[index]) for index in range(8)]
    for thread in threads:
        thread.start()
    received: dict[str, list[float]] = {str(index): [] for index in range(8)}
    for _ in range(800):
        _, message = controller.hear()
        assert isinstance(message, WorkerProgress)
        ((thread, number),) = message.counters.items()
        received[thread].append(number)
    assert all(numbers == list(range(100)) for numbers in received.values())
    for thread in threads:
        thread.join()


def test_closed_link_raises_instead_of_dropping_messages(link: Link):
    link.close()
    with pytest.raises(WireError, match="The link is closed; Done was not sent"):
        link.emit(Done())
