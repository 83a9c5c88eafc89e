"""A test worker behind a bad connection: a relay loses or delays its replies to requests with the
id "lost" or "late"."""

import sys
import tempfile
import threading
import time

import zmq

from millrace.cluster.link import Link, run_worker
from millrace.cluster.messages import Generate, Stop, WorkerProgress


class Relay:
    """Forwards messages between the worker's link and the hub, in one thread."""

    def __init__(self, hub: str) -> None:
        folder = tempfile.mkdtemp(prefix="relay-")
        self.address = f"ipc://{folder}/relay"
        self._hub = hub
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(self.address)
        self._late: list[tuple[float, list[bytes]]] = []  # (send time, frames)
        self._faults: dict[bytes, str] = {}  # by call id
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        identity, *hello = self._front.recv_multipart()
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.ROUTING_ID, identity)
        back.connect(self._hub)
        back.send_multipart(hello)
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(back, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(timeout=10))
            if back in ready:
                frames = back.recv_multipart()
                self._choose_fault(frames)
                self._front.send_multipart([identity, *frames])
            if self._front in ready:
                self._forward_reply(self._front.recv_multipart()[1:], back)
            for at_s, frames in [one for one in self._late if one[0] <= time.monotonic()]:
                self._late.remove((at_s, frames))
                back.send_multipart(frames)

    def _choose_fault(self, frames: list[bytes]) -> None:
        for fault in (b"lost", b"late"):
            if fault in frames[1]:
                self._faults[frames[0]] = fault.decode()

    def _forward_reply(self, frames: list[bytes], back: zmq.Socket) -> None:
        match self._faults.get(frames[0]):
            case "lost":
                print("lost a reply", flush=True)
            case "late":
                self._late.append((time.monotonic() + 0.4, frames))
            case _:
                back.send_multipart(frames)


def main(link: Link, name: str) -> None:
    work = 0
    while True:
        call = link.receive(timeout_s=0.05)
        link.emit(WorkerProgress(spans=[], counters={}, work=work, waits=False))
        if call is None:
            continue
        work += 1
        match call.message:
            case Stop():
                call.reply()
                return
            case Generate():
                call.reply()
            case message:
                call.fail(ValueError(f"{name} does not know {type(message).__name__}"))


if __name__ == "__main__":
    position = sys.argv.index("--address") + 1
    sys.argv[position] = Relay(sys.argv[position]).address
    run_worker(main)
