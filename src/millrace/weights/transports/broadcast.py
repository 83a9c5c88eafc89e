"""A process group for weights, and the broadcast of a payload through it in buckets.

Promise: the group is separate from the default group and from any that a trainer uses. Two buckets
are in flight at a time: while one is sent, the one before it is verified. Every failure is a
BroadcastFailed, at once if a peer died and within the timeout otherwise. The group must then be
closed, which makes all other members fail at once, too.

Rank 0 is the trainer. gloo sends host memory; NCCL sends GPU memory and needs a GPU per member.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from millrace.weights.transports.rendezvous import listen

# torch exports these without naming them in its typed interface.
PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
Gloo: Any = dist.ProcessGroupGloo


class BroadcastFailed(Exception):
    """The group lost a member or exceeded its timeout."""


@contextlib.contextmanager
def _reporting_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BroadcastFailed(reason) from error


def open_store(address: str, *, timeout_s: float) -> Any:
    """The store in which members of groups find each other; listens on this address only."""
    listener = listen(address)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, *, timeout_s: float) -> Any:
    with _reporting_failures():
        return TCPStore(address, port, timeout=timedelta(seconds=timeout_s))


class BroadcastGroup:
    """One member's side of the present group. Used by one thread."""

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        """`device` of the payloads; of the same type in all members."""
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._group: Any = None
        self._number = 0  # of the group; 0 = none

    def join(self, store: Any, *, number: int, rank: int, size: int, host: str) -> None:
        """Replace the group, unless it has this number already; returns when all members have
        joined. Numbers of one store are above 0 and not used again. `host`: this member's own
        address, for the others to connect to."""
        if number == self._number:
            return
        self.close()
        with _reporting_failures():
            store = PrefixStore(f"group/{number}", store)
            if self.device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            else:
                gloo = Gloo._Options()
                gloo._devices = [Gloo.create_device(hostname=host)]
                gloo._timeout = self._timeout
                self._group = Gloo(store, rank, size, gloo)
        self._number = number

    def broadcast(
        self,
        payload: torch.Tensor,  # [num_bytes] uint8: sent by rank 0, filled in all others
        *,
        bucket_bytes: int,
        on_bucket: Callable[[int, torch.Tensor], None] = lambda number, bucket: None,
    ) -> None:
        """`on_bucket` is called with every finished bucket, in order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        in_flight: deque[tuple[int, torch.Tensor, Any]] = deque()

        def finish_first() -> None:
            number, bucket, work = in_flight.popleft()
            work.wait(self._timeout)
            on_bucket(number, bucket)

        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with _reporting_failures():
            with torch.cuda.stream(self._stream):  # does nothing without one
                for number, bucket in enumerate(payload.split(bucket_bytes)):
                    in_flight.append((number, bucket, self._group.broadcast([bucket], options)))
                    if len(in_flight) == 2:
                        finish_first()
                while in_flight:
                    finish_first()
            if self._stream is not None:
                self._stream.synchronize()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._number = None, 0
