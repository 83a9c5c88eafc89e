"""The CUDA IPC transport: trainer and engines on one host, on the same GPU or on several.

Promise: the trainer packs into GPU memory that the engines open, and an engine copies it from
device to device into its staging memory; nothing passes through the host. A handle is plain bytes
in the update; nothing is unpickled. The packing stream is synchronized before an update is
announced, and the engine's before it acknowledges, so no event has to be shared.

The trainer's side runs on the publisher's stream and an engine's on that of its StagingReceiver:
neither waits for a training step or a decoding step. An engine cannot be in the trainer's process:
CUDA does not open a handle where it was made.
"""

import base64
from dataclasses import replace

import msgspec
import torch

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.recv_backend import Fetched, Staging
from millrace.weights.send_backend import Memory

TRANSPORT = "ipc"


class Handle(msgspec.Struct, kw_only=True, frozen=True):
    """Location of an update: torch's handle for opening a storage in another process."""

    device: int
    memory: str  # base64, as the two below
    num_bytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    has_event: bool


class SharedMemory:
    """GPU memory that other processes can open."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        # Never empty: empty memory has no handle.
        self._whole = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.flat = self._whole[:num_bytes]
        self.location = _location(self._whole)

    def close(self) -> None:
        # torch keeps the memory; an engine that still has it open must not read it as weights.
        self._whole.zero_()
        del self._whole
        self.flat = torch.empty(0, dtype=torch.uint8)


class IpcSendBackend:
    """Trainer side."""

    transport = TRANSPORT

    def allocate(self, num_bytes: int, *, device: torch.device) -> SharedMemory:
        if device.type != "cuda":
            raise WeightError(
                "weights.transport = 'ipc' shares GPU memory, but the trainer computes on"
                f" {str(device)!r}; set it to 'auto' or 'shm'."
            )
        return SharedMemory(num_bytes, device=device)

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        assert isinstance(payload, SharedMemory)
        torch.cuda.current_stream(payload.flat.device).synchronize()
        short = update.delta
        if short is not None:
            assert isinstance(delta, SharedMemory)
            short = replace(short, location=delta.location)
        return replace(update, location=payload.location, delta=short)

    def withdraw(self, version: int) -> None:
        pass  # engines copy it before they acknowledge

    def close(self) -> None:
        pass


class IpcRecvBackend:
    """Engine side."""

    transport = TRANSPORT

    def __init__(self, *, device: torch.device, keep: int = 4) -> None:
        if device.type != "cuda":
            raise WeightError(
                "weights.transport = 'ipc' shares GPU memory, but placement.engines is"
                f" {str(device)!r}; set the transport to 'auto' or 'shm'."
            )
        self._device = device
        self._keep = keep
        self._open: dict[str, torch.Tensor] = {}  # by location, least recently used first

    def fetch(self, update: WeightUpdate, *, base: int | None, staging: Staging) -> Fetched:
        short = update.delta
        if short is not None and short.base == base:
            blob = self._opened(short.location, num_bytes=short.num_bytes)
            return Fetched(flat=blob, kind="delta")
        payload = staging.take(update, device=self._device)
        payload.copy_(self._opened(update.location, num_bytes=update.num_bytes))
        return Fetched(flat=payload, kind="staged")

    def close(self) -> None:
        self._open.clear()

    def _opened(self, location: str, *, num_bytes: int) -> torch.Tensor:
        flat = self._open.pop(location, None)
        if flat is None:
            flat = _open(location)
        if len(flat) < num_bytes:
            raise WeightError(f"The shared GPU memory has {len(flat)} bytes of {num_bytes}.")
        self._open[location] = flat
        while len(self._open) > self._keep:
            del self._open[next(iter(self._open))]
        return flat[:num_bytes]


def _location(flat: torch.Tensor) -> str:
    device, memory, num_bytes, offset, counter, counter_offset, event, has_event = (
        flat.untyped_storage()._share_cuda_()
    )
    handle = Handle(
        device=device,
        memory=base64.b64encode(memory).decode(),
        num_bytes=num_bytes,
        offset=offset,
        counter=base64.b64encode(counter).decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        has_event=has_event,
    )
    return msgspec.json.encode(handle).decode()


def _open(location: str) -> torch.Tensor:
    try:
        handle = msgspec.json.decode(location, type=Handle)
        storage = torch.UntypedStorage._new_shared_cuda(
            handle.device,
            base64.b64decode(handle.memory),
            handle.num_bytes,
            handle.offset,
            base64.b64decode(handle.counter),
            handle.counter_offset,
            base64.b64decode(handle.event),
            handle.has_event,
        )
    except (RuntimeError, ValueError) as error:
        raise WeightError(
            f"The trainer's GPU memory cannot be opened ({str(error).splitlines()[0]}); the trainer"
            " must be alive, on this host, and see the same GPUs as the engine."
        ) from error
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", handle.device))
    return flat.set_(storage)
