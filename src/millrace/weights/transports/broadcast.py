"""A process group for weights, and the broadcast of a payload through it in buckets.

Promise: the group is separate from the default group and from any that a trainer uses. Two buckets
are in flight at a time: while one is sent, the one before it is verified. Every failure is a
BroadcastFailed, at once if a peer died and within the timeout otherwise. The group must then be
closed, which makes all other members fail at once, too.

Rank 0 is the trainer. gloo sends host memory; NCCL sends GPU memory and needs a GPU per member.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from millrace.weights.transports.rendezvous import listen

# torch exports these without naming them in its typed interface.
PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
Gloo: Any = dist.ProcessGroupGloo

Backend = Literal["gloo", "nccl"]


class BroadcastFailed(Exception):
    """The group lost a member or exceeded its timeout."""


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
    """The store that the trainer opened."""
    try:
        return TCPStore(address, port, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise BroadcastFailed(_first_line(error)) from error


class BroadcastGroup:
    """Used by one thread."""

    def __init__(
        self,
        store: Any,
        *,
        number: int,  # no two groups of a store have the same
        rank: int,
        size: int,
        backend: Backend,
        host: str,  # this member's own address, for the others to connect to
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Returns when all members have joined."""
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            store = PrefixStore(f"group/{number}", store)
            self._group = _form(store, rank, size, backend, host, self._timeout)
        except RuntimeError as error:
            raise BroadcastFailed(_first_line(error)) from error

    def broadcast(
        self,
        payload: torch.Tensor,  # [num_bytes] uint8: sent by rank 0, filled in all others
        *,
        bucket_bytes: int,
        on_bucket: Callable[[int, torch.Tensor], None] = lambda number, bucket: None,
    ) -> None:
        """`on_bucket` is called with every finished bucket, in order."""
        in_flight: deque[tuple[int, torch.Tensor, Any]] = deque()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):  # does nothing without one
                for number, bucket in enumerate(payload.split(bucket_bytes)):
                    in_flight.append((number, bucket, self._send(bucket)))
                    if len(in_flight) == 2:
                        self._finish(*in_flight.popleft(), on_bucket)
                while in_flight:
                    self._finish(*in_flight.popleft(), on_bucket)
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            raise BroadcastFailed(_first_line(error)) from error

    def close(self) -> None:
        self._group.abort()

    def _send(self, bucket: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([bucket], options)

    def _finish(
        self,
        number: int,
        bucket: torch.Tensor,
        work: Any,
        on_bucket: Callable[[int, torch.Tensor], None],
    ) -> None:
        work.wait(self._timeout)
        on_bucket(number, bucket)


def _form(store: Any, rank: int, size: int, backend: Backend, host: str, timeout: timedelta) -> Any:
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = Gloo._Options()
    gloo._devices = [Gloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return Gloo(store, rank, size, gloo)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
