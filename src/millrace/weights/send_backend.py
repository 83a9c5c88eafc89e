"""The trainer's end of every transport: packs each version and hands it to a SendBackend.

Promise: publish() returns when engines can fetch the complete version. Its memory is not written
again before the version is released. At most MAX_HELD versions are held at a time.

With payload = "delta" the newest payload is kept, so that the next version can also be sent as its
difference. The full payload is always available, for an engine that holds another version.

Used by one thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, SwapProbe, TensorSpec, WeightUpdate
from millrace.weights import packing

MAX_HELD = 3
Payload = Literal["full", "delta"]
# packing.pack(), or its replacement if the tensors are sharded over ranks.
Pack = Callable[[Mapping[str, torch.Tensor], Sequence[TensorSpec], torch.Tensor], None]
Reference = Callable[[Mapping[str, torch.Tensor]], SwapProbe]  # see probe.py


class NoSpace(WeightError):
    """There is no space for a version now; there may be later."""


class Superseded(WeightError):
    """A newer version is sent instead; this one may be dropped."""


class Memory:
    """Memory for a payload or a delta, zeros at first. This one is torch's own."""

    location = ""  # where engines find it, in the transport's own format

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self.flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self.flat = self.flat[:0].clone()


class SendBackend:
    """Makes payloads reachable for engines; what differs between transports."""

    transport: str

    def allocate(self, num_bytes: int, *, device: torch.device) -> Memory:
        """Memory for a payload whose tensors are on `device`."""
        raise NotImplementedError

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        """Make it available to engines; returns the update with its locations."""
        return update

    def withdraw(self, version: int) -> None:
        """No engine will request it again; returns when none reads it any more."""

    def close(self) -> None:
        """Free everything except the memory that it allocated."""


@dataclass(kw_only=True, slots=True, eq=False)
class PayloadSlot:
    """Memory for one version, reused for versions of the same layout. The bytes between two tensors
    stay zero, so equal weights are equal bytes."""

    layout: tuple[TensorSpec, ...]
    payload: Memory
    version: int = -1
    checksum: int = 0
    delta: Memory | None = None

    def drop_delta(self) -> None:
        if self.delta is not None:
            self.delta.close()
            self.delta = None

    def close(self) -> None:
        self.drop_delta()
        self.payload.close()


@dataclass(eq=False)
class PackingSender:
    """Trainer side of a transport; holds a bounded number of versions."""

    backend: SendBackend
    _: KW_ONLY
    dtype: torch.dtype  # of floating-point weights during the transfer
    payload: Payload = "full"
    reference: Reference | None = None  # computes the probe of each version

    def __post_init__(self) -> None:
        self._free: list[PayloadSlot] = []
        self._held: dict[int, PayloadSlot] = {}  # by version
        self._newest: PayloadSlot | None = None  # base of the next delta, released or not

    @property
    def has_room(self) -> bool:
        """False while MAX_HELD versions are not released."""
        return len(self._held) < MAX_HELD

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, pack: Pack = packing.pack
    ) -> WeightUpdate:
        if version in self._held:
            raise WeightError(f"Version {version} is already published.")
        if not self.has_room:
            raise WeightError(
                f"Versions {sorted(self._held)} fill all {MAX_HELD} slots;"
                " release one before publishing the next."
            )
        specs, num_bytes = packing.lay_out(tensors, dtype=self.dtype)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        slot = self._take(specs, num_bytes, device=device)
        try:
            pack(tensors, specs, slot.payload.flat)
            probe = None
            if self.reference is not None:
                probe = self.reference(packing.unpack(specs, slot.payload.flat))
            update = WeightUpdate(
                version=version,
                tensors=specs,
                num_bytes=num_bytes,
                checksum=packing.checksum(slot.payload.flat),
                transport=self.backend.transport,
                location=slot.payload.location,
                delta=self._find_delta(slot),
                probe=probe,
            )
            update = self.backend.offer(update, payload=slot.payload, delta=slot.delta)
        except BaseException:
            slot.drop_delta()
            self._free.append(slot)
            raise
        slot.version, slot.checksum = version, update.checksum
        self._held[version] = slot
        if self.payload == "delta":
            previous, self._newest = self._newest, slot
            self._recycle(previous)
        return update

    def base_for(self, layout: Sequence[TensorSpec]) -> PayloadSlot | None:
        """The version whose difference from the next one, of this layout, will be sent."""
        newest = self._newest
        return newest if newest is not None and newest.layout == layout else None

    def release(self, version: int) -> None:
        if version not in self._held:
            raise WeightError(f"Version {version} is not published, or was released before.")
        self.backend.withdraw(version)
        slot = self._held.pop(version)
        slot.drop_delta()
        self._recycle(slot)

    def close(self) -> None:
        self.backend.close()
        slots = {*self._free, *self._held.values(), *([self._newest] if self._newest else [])}
        for slot in slots:
            slot.close()
        self._free.clear()
        self._held.clear()
        self._newest = None

    def _take(
        self, layout: tuple[TensorSpec, ...], num_bytes: int, *, device: torch.device
    ) -> PayloadSlot:
        """A free slot of this layout. Slots of another layout are closed: the model changed."""
        while self._free:
            slot = self._free.pop(0)
            if slot.layout == layout:
                return slot
            slot.close()
        return PayloadSlot(layout=layout, payload=self.backend.allocate(num_bytes, device=device))

    def _find_delta(self, slot: PayloadSlot) -> Delta | None:
        """The difference between the slot and the newest version, written to its own memory."""
        if (base := self.base_for(slot.layout)) is None:
            return None
        payload = slot.payload.flat
        changes = packing.find_delta(payload, base.payload.flat, word_bytes=self.dtype.itemsize)
        if changes is None:
            return None
        num_bytes = sum(part.nbytes for part in changes)
        slot.delta = self.backend.allocate(num_bytes, device=payload.device)
        packing.write_delta(changes, into=slot.delta.flat)
        return Delta(
            base=base.checksum,
            num_changed=len(changes[0]),
            word_bytes=self.dtype.itemsize,
            num_bytes=num_bytes,
            location=slot.delta.location,
        )

    def _recycle(self, slot: PayloadSlot | None) -> None:
        """Free a slot unless engines or the next delta still need it."""
        if slot is not None and slot is not self._newest and slot.version not in self._held:
            self._free.append(slot)
