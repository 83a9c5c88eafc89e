"""The transports of one host: shared memory, and CUDA IPC between one GPU or several.

Shared memory: the trainer packs into segments, and engines map them. Promise: no copies are made,
and nothing outlives the trainer. On Linux a segment is an anonymous file that processes of the same
user open through /proc/PID/fd. Elsewhere it is a file in a private folder, removed by close(). A
mapped version does not change until it is released, and a mapping lives as long as any tensor that
views it.

CUDA IPC: the trainer packs into GPU memory that the engines open, and an engine copies it from
device to device into its staging memory; nothing passes through the host. A handle is plain bytes
in the update; nothing is unpickled. The packing stream is synchronized before an update is
announced, and the engine's before it acknowledges, so no event has to be shared. Neither side waits
for a training step or a decoding step: both have streams of their own. An engine cannot be in the
trainer's process, because CUDA does not open a handle where it was made.
"""

import ctypes
import fcntl
import functools
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.models.devices import fixed_segments
from millrace.weights.backends import Fetched, Memory, RecvBackend, SendBackend, Staging

Backing = Literal["memfd", "file"]
DEFAULT_BACKING: Backing = "memfd" if sys.platform == "linux" else "file"


class Segment(Memory):
    """A writable segment of its owner; other processes open `location`. Used by one thread."""

    def __init__(self, num_bytes: int, *, backing: Backing = DEFAULT_BACKING) -> None:
        self._folder: Path | None = None
        if backing == "memfd":
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._fd = os.memfd_create("millrace-weights", flags)
            self.location = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="millrace-weights-"))
            self.location = str(self._folder / "segment")
            self._fd = os.open(self.location, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._fd, _mapped_bytes(num_bytes))
        if backing == "memfd":
            # A reader of a segment that shrinks under it would be killed by SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = mmap.mmap(self._fd, _mapped_bytes(num_bytes))
        self.flat = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Free the memory as soon as no process maps it."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self.flat
        if self._folder is not None:
            shutil.rmtree(self._folder)


class ShmSendBackend(SendBackend):
    """Trainer side. An engine that still maps a withdrawn version sees a checksum error."""

    transport = "shm"

    def __init__(self, *, backing: Backing = DEFAULT_BACKING) -> None:
        self._backing: Backing = backing

    def allocate(self, num_bytes: int, *, device: torch.device) -> Segment:
        return Segment(num_bytes, backing=self._backing)


class ShmRecvBackend(RecvBackend):
    """Engine side: maps segments read-only, which are valid until release, and keeps a few."""

    def __init__(self, *, keep: int = 3) -> None:
        self._keep = keep
        # By (device, inode), least recently used first. A mapped inode is never reused for
        # another segment, so keys stay unambiguous.
        self._mappings: dict[tuple[int, int], mmap.mmap] = {}

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        wanted = delta or update
        mapped = self.map(wanted.location, num_bytes=wanted.num_bytes)
        return Fetched(mapped, "mapped" if delta is None else "delta")

    def map(self, location: str, *, num_bytes: int) -> torch.Tensor:
        """The segment as a tensor [num_bytes] uint8, which keeps it mapped."""
        try:
            fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightError(
                f"Cannot open the published weights at {location}: {error.strerror}; the trainer"
                " must be alive, on this host, and run by the same user."
            ) from None
        with os.fdopen(fd, "rb"):  # closes it
            status = os.fstat(fd)
            if status.st_size != _mapped_bytes(num_bytes):
                raise WeightError(
                    f"The segment at {location} has {status.st_size} bytes, but the update has"
                    f" {num_bytes}; it is not, or no longer, the one that was published."
                )
            key = (status.st_dev, status.st_ino)
            if (mapping := self._mappings.pop(key, None)) is None:
                mapping = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
        self._mappings[key] = mapping
        while len(self._mappings) > self._keep:
            del self._mappings[next(iter(self._mappings))]
        return torch.frombuffer(_buffer(mapping), dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        self._mappings.clear()


def _mapped_bytes(num_bytes: int) -> int:
    return max(num_bytes, 1)  # an empty file cannot be mapped


def _buffer(mapping: mmap.mmap) -> Any:
    """The mapping as a buffer that torch accepts without a warning; writing to it is a fault. The
    mapping is never closed explicitly: torch holds the buffer's owner but no export of it, so
    closing would unmap the memory of live tensors."""
    array = np.frombuffer(mapping, dtype=np.uint8)
    buffer = (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
    buffer.mapping = array  # type: ignore[attr-defined]
    return buffer


_MAX_OPEN = 4  # payloads and deltas


# Location of an update: torch's handle for opening a storage in another process, as _share_cuda_()
# returns it; the device is first. Bytes are base64 in JSON.
Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]


class SharedMemory(Memory):
    """GPU memory that other processes can open."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        # Never empty: empty memory has no handle.
        with fixed_segments():
            self._whole = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.flat = self._whole[:num_bytes]
        handle = self._whole.untyped_storage()._share_cuda_()
        self.location = msgspec.json.encode(handle).decode()

    def close(self) -> None:
        # torch keeps the memory; an engine that still has it open must not read it as weights.
        self._whole.zero_()
        self._whole = self.flat = torch.empty(0, dtype=torch.uint8)


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
    def __init__(self, *, device: torch.device) -> None:
        if device.type != "cuda":
            raise WeightError(
                "weights.transport = 'ipc' shares GPU memory, but placement.engines is"
                f" {str(device)!r}; set the transport to 'auto' or 'shm'."
            )
        self._device = device
        self._open = functools.lru_cache(_MAX_OPEN)(_open)

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        if delta is not None:
            return Fetched(self._opened(delta.location, num_bytes=delta.num_bytes), "delta")
        payload = staging.take(update, device=self._device)
        payload.copy_(self._opened(update.location, num_bytes=update.num_bytes))
        return Fetched(payload, "staged")

    def close(self) -> None:
        self._open.cache_clear()

    def _opened(self, location: str, *, num_bytes: int) -> torch.Tensor:
        flat = self._open(location)
        if len(flat) < num_bytes:
            raise WeightError(f"The shared GPU memory has {len(flat)} bytes of {num_bytes}.")
        return flat[:num_bytes]


def _open(location: str) -> torch.Tensor:
    try:
        handle = msgspec.json.decode(location, type=Handle)
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
    except (RuntimeError, ValueError) as error:
        raise WeightError(
            f"The trainer's GPU memory cannot be opened ({str(error).splitlines()[0]}); the trainer"
            " must be alive, on this host, and see the same GPUs as the engine."
        ) from error
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", handle[0]))
    return flat.set_(storage)
