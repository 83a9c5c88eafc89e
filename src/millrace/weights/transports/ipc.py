"""The CUDA IPC transport: trainer and engines on one host, on the same GPU or on several.

Promise: the trainer packs into GPU memory that the engines open, and an engine copies it from
device to device into its staging memory; nothing passes through the host. A handle is plain bytes
in the update; nothing is unpickled. The packing stream is synchronized before an update is
announced, and the engine's before it acknowledges, so no event has to be shared.

Neither side waits for a training step or a decoding step: both have streams of their own. An engine
cannot be in the trainer's process, because CUDA does not open a handle where it was made.
"""

import msgspec
import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.weights.recv_backend import Fetched, RecvBackend, Staging
from millrace.weights.send_backend import Memory, SendBackend

_MAX_OPEN = 4  # payloads and deltas


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """Location of an update: torch's handle for opening a storage in another process, as
    _share_cuda_() returns it. Bytes are base64 in JSON."""

    device: int
    memory: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    has_event: bool


class SharedMemory(Memory):
    """GPU memory that other processes can open."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        # Never empty: empty memory has no handle.
        self._whole = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.flat = self._whole[:num_bytes]
        handle = Handle(*self._whole.untyped_storage()._share_cuda_())
        self.location = msgspec.json.encode(handle).decode()

    def close(self) -> None:
        # torch keeps the memory; an engine that still has it open must not read it as weights.
        self._whole.zero_()
        del self._whole
        self.flat = torch.empty(0, dtype=torch.uint8)


class IpcSendBackend(SendBackend):
    """Trainer side. Engines copy a version before they acknowledge it."""

    transport = "ipc"

    def allocate(self, num_bytes: int, *, device: torch.device) -> SharedMemory:
        if device.type != "cuda":
            raise WeightError(
                "weights.transport = 'ipc' shares GPU memory, but the trainer computes on"
                f" {str(device)!r}; set it to 'auto' or 'shm'."
            )
        return SharedMemory(num_bytes, device=device)

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        torch.cuda.current_stream(payload.flat.device).synchronize()
        return update


class IpcRecvBackend(RecvBackend):
    """Engine side."""

    def __init__(self, *, device: torch.device) -> None:
        if device.type != "cuda":
            raise WeightError(
                "weights.transport = 'ipc' shares GPU memory, but placement.engines is"
                f" {str(device)!r}; set the transport to 'auto' or 'shm'."
            )
        self._device = device
        self._open: dict[str, torch.Tensor] = {}  # by location, least recently used first

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        if delta is not None:
            return Fetched(self._opened(delta.location, num_bytes=delta.num_bytes), "delta")
        payload = staging.take(update, device=self._device)
        payload.copy_(self._opened(update.location, num_bytes=update.num_bytes))
        return Fetched(payload, "staged")

    def close(self) -> None:
        self._open.clear()

    def _opened(self, location: str, *, num_bytes: int) -> torch.Tensor:
        flat = self._open.pop(location, None)
        flat = _open(location) if flat is None else flat
        if len(flat) < num_bytes:
            raise WeightError(f"The shared GPU memory has {len(flat)} bytes of {num_bytes}.")
        self._open[location] = flat
        while len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]
        return flat[:num_bytes]


def _open(location: str) -> torch.Tensor:
    try:
        handle = msgspec.json.decode(location, type=Handle)
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(handle))
    except (RuntimeError, ValueError) as error:
        raise WeightError(
            f"The trainer's GPU memory cannot be opened ({str(error).splitlines()[0]}); the trainer"
            " must be alive, on this host, and see the same GPUs as the engine."
        ) from error
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", handle.device))
    return flat.set_(storage)
