"""The shared-memory transport: the trainer packs into a ring of segments, engines map them.

Promise: all-or-nothing. stage() returns the complete, verified tensors of one version or raises
WeightError; the sender never writes into a segment whose version was not released.

Each class is used by one thread of its process.
"""

from collections.abc import Mapping

import torch

from millrace.core.errors import WeightError
from millrace.core.weight_update import WeightUpdate
from millrace.weights import packing
from millrace.weights.segment import Backing, Segment, SegmentReader, default_backing

TRANSPORT = "shm"


class ShmSender:
    """Trainer side. Holds up to `num_segments` versions that engines may be reading."""

    def __init__(
        self, *, dtype: torch.dtype, num_segments: int = 3, backing: Backing | None = None
    ) -> None:
        self.dtype = dtype
        self._num_segments = num_segments
        self._backing: Backing = backing or default_backing()
        self._free: list[Segment] = []
        self._held: dict[int, Segment] = {}  # by version

    @property
    def has_room(self) -> bool:
        """False while every segment is held by a version that was not released."""
        return len(self._held) < self._num_segments

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        if version in self._held:
            raise WeightError(f"Version {version} is already published.")
        if not self.has_room:
            raise WeightError(
                f"Versions {sorted(self._held)} fill all {self._num_segments} segments;"
                " release one before publishing the next."
            )
        specs, num_bytes = packing.lay_out(tensors, dtype=self.dtype)
        segment = self._take(num_bytes)
        self._held[version] = segment
        try:
            packing.pack(tensors, specs, into=segment.payload)
        except BaseException:
            self.release(version)
            raise
        return WeightUpdate(
            version=version,
            tensors=specs,
            num_bytes=num_bytes,
            checksum=packing.checksum(segment.payload),
            transport=TRANSPORT,
            location=segment.location,
        )

    def release(self, version: int) -> None:
        segment = self._held.pop(version, None)
        if segment is None:
            raise WeightError(f"Version {version} is not published, or was released before.")
        self._free.append(segment)

    def close(self) -> None:
        for segment in (*self._free, *self._held.values()):
            segment.close()
        self._free.clear()
        self._held.clear()

    def _take(self, num_bytes: int) -> Segment:
        """A free segment of this size. Segments of another size are given up: the model changed."""
        for segment in [*self._free]:
            self._free.remove(segment)
            if segment.num_bytes == num_bytes:
                return segment
            segment.close()
        return Segment(num_bytes, backing=self._backing)


class ShmReceiver:
    """Engine side. The tensors of a stage() are valid until the version is released."""

    def __init__(
        self, *, expected: Mapping[str, tuple[int, ...]] | None = None, keep: int = 3
    ) -> None:
        """`expected`: names and shapes the model has, if updates must be exactly those."""
        self._expected = expected
        self._reader = SegmentReader(keep=keep)

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        if update.transport != TRANSPORT:
            raise WeightError(
                f"Version {update.version} comes by {update.transport!r}, and this engine takes"
                f" {TRANSPORT!r}; set weights.transport the same for all workers."
            )
        packing.check_manifest(update.tensors, num_bytes=update.num_bytes)
        if self._expected is not None:
            packing.check_fits(update.tensors, expected=self._expected)
        payload = self._reader.map(update.location, num_bytes=update.num_bytes)
        if packing.checksum(payload) != update.checksum:
            raise WeightError(
                f"The bytes of version {update.version} do not match their checksum;"
                " the engine keeps the weights it has."
            )
        return packing.unpack(update.tensors, payload)

    def close(self) -> None:
        self._reader.close()
