"""A test worker that runs out of memory on request."""

import resource
from pathlib import Path

from millrace.cluster.link import Link, run_worker
from millrace.cluster.messages import Generate, Stop

ROOM_BYTES = 64 * 2**20  # that the process may still allocate


def main(link: Link, name: str) -> None:
    allocated: list[bytearray] = []
    while True:
        call = link.receive()
        assert call is not None
        match call.message:
            case Stop():
                call.reply()
                return
            case Generate(request=request) if request.id == "exhaust memory":
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + ROOM_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                while True:
                    allocated.append(bytearray(2**20))
            case _:
                call.reply()


if __name__ == "__main__":
    run_worker(main)
