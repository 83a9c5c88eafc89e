"""The shared-memory transport: the trainer packs into segments, engines on the same host map them.

Promise: no copies are made, and nothing outlives the trainer (see segment.py). A mapped version
does not change until it is released.
"""

from dataclasses import replace

import torch

from millrace.core.records import WeightUpdate
from millrace.weights.recv_backend import Fetched, Staging
from millrace.weights.send_backend import Memory
from millrace.weights.transports.segment import Backing, Segment, SegmentReader, default_backing

TRANSPORT = "shm"


class ShmSendBackend:
    """Trainer side."""

    transport = TRANSPORT

    def __init__(self, *, backing: Backing | None = None) -> None:
        self._backing: Backing = backing or default_backing()

    def allocate(self, num_bytes: int, *, device: torch.device) -> Segment:
        return Segment(num_bytes, backing=self._backing)

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        assert isinstance(payload, Segment)
        short = update.delta
        if short is not None:
            assert isinstance(delta, Segment)
            short = replace(short, location=delta.location)
        return replace(update, location=payload.location, delta=short)

    def withdraw(self, version: int) -> None:
        pass  # an engine that still maps it sees a checksum error

    def close(self) -> None:
        pass


class ShmRecvBackend:
    """Engine side. Fetched memory is valid until the version is released."""

    transport = TRANSPORT

    def __init__(self, *, keep: int = 3) -> None:
        self._reader = SegmentReader(keep=keep)

    def fetch(self, update: WeightUpdate, *, base: int | None, staging: Staging) -> Fetched:
        short = update.delta
        if short is not None and short.base == base:
            blob = self._reader.map(short.location, num_bytes=short.num_bytes)
            return Fetched(flat=_tensor(blob, short.num_bytes), kind="delta")
        payload = self._reader.map(update.location, num_bytes=update.num_bytes)
        return Fetched(flat=_tensor(payload, update.num_bytes), kind="mapped")

    def close(self) -> None:
        self._reader.close()


def _tensor(buffer: object, num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:  # frombuffer takes no empty range
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8)
