"""The trainer's end of every transport: packs each version, and hands it to an outlet.

Promise: publish() returns once the version lies complete where engines find it. Memory that a
version lies in is not written again before that version is released. At most `max_held` versions
are out at a time.

An outlet is what differs between transports: whose memory it is, and how engines get at it. With
payload = "delta" the newest payload is kept, so that the next version can also be given as what
changed since; the full payload is always there too, for an engine that holds another version.

Used by one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from millrace.core.errors import WeightError
from millrace.core.weight_update import Delta, TensorSpec, WeightUpdate
from millrace.weights import delta, packing
from millrace.weights.checksum import checksum

Payload = Literal["full", "delta"]


class NoSpace(WeightError):
    """There was no room for a version where it has to lie; later there may be."""


class Superseded(WeightError):
    """A newer version goes out instead; the weights may be dropped."""


class Pack(Protocol):
    """packing.pack(), or what takes its place where the tensors are not all here."""

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        *,
        into: torch.Tensor,
    ) -> None: ...


class Memory(Protocol):
    """Memory of an outlet; zeros at first."""

    @property
    def flat(self) -> torch.Tensor: ...  # [num_bytes] uint8

    def close(self) -> None: ...


class SendBackend(Protocol):
    """Makes payloads reachable for engines."""

    transport: str

    def allocate(self, num_bytes: int, *, device: torch.device) -> Memory:
        """Memory for a payload whose tensors lie on `device`."""
        ...

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        """Put it where engines find it; returns the update with its locations filled in."""
        ...

    def withdraw(self, version: int) -> None:
        """No engine asks for it any more; returns when none reads it either."""
        ...

    def close(self) -> None: ...


class TensorMemory:
    """Memory that torch allocated."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self.flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self.flat = self.flat[:0].clone()


@dataclass(kw_only=True, slots=True, eq=False)
class _PayloadSlot:
    """Memory for one version, used again for versions of the same layout: so the bytes between
    two tensors stay zero, and equal weights are equal bytes."""

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


class PackingSender:
    def __init__(
        self,
        outlet: SendBackend,
        *,
        dtype: torch.dtype,
        payload: Payload = "full",
        max_held: int = 3,
    ) -> None:
        self.dtype = dtype
        self._outlet = outlet
        self._payload = payload
        self._max_held = max_held
        self._free: list[_PayloadSlot] = []
        self._held: dict[int, _PayloadSlot] = {}  # by version
        self._newest: _PayloadSlot | None = None  # what the next delta starts from, released or not

    @property
    def has_room(self) -> bool:
        """False while max_held versions were not released."""
        return len(self._held) < self._max_held

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, pack: Pack = packing.pack
    ) -> WeightUpdate:
        if version in self._held:
            raise WeightError(f"Version {version} is already published.")
        if not self.has_room:
            raise WeightError(
                f"Versions {sorted(self._held)} fill all {self._max_held} places;"
                " release one before publishing the next."
            )
        specs, num_bytes = packing.lay_out(tensors, dtype=self.dtype)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        slot = self._take(specs, num_bytes, device=device)
        try:
            pack(tensors, specs, into=slot.payload.flat)
            update = WeightUpdate(
                version=version,
                tensors=specs,
                num_bytes=num_bytes,
                checksum=checksum(slot.payload.flat),
                transport=self._outlet.transport,
                location="",
                delta=self._find_delta(slot),
            )
            update = self._outlet.offer(update, payload=slot.payload, delta=slot.delta)
        except BaseException:
            slot.drop_delta()
            self._free.append(slot)
            raise
        slot.version, slot.checksum = version, update.checksum
        self._held[version] = slot
        if self._payload == "delta":
            previous, self._newest = self._newest, slot
            self._recycle(previous)
        return update

    def release(self, version: int) -> None:
        if version not in self._held:
            raise WeightError(f"Version {version} is not published, or was released before.")
        self._outlet.withdraw(version)
        slot = self._held.pop(version)
        slot.drop_delta()
        self._recycle(slot)

    def close(self) -> None:
        self._outlet.close()
        newest = (
            [] if self._newest is None or self._newest.version in self._held else [self._newest]
        )
        for slot in (*self._free, *self._held.values(), *newest):
            slot.close()
        self._free.clear()
        self._held.clear()
        self._newest = None

    def _take(
        self, layout: tuple[TensorSpec, ...], num_bytes: int, *, device: torch.device
    ) -> _PayloadSlot:
        """A free slot of this layout. Slots of another are given up: the model changed."""
        for slot in [*self._free]:
            self._free.remove(slot)
            if slot.layout == layout:
                return slot
            slot.close()
        return _PayloadSlot(layout=layout, payload=self._outlet.allocate(num_bytes, device=device))

    def _find_delta(self, slot: _PayloadSlot) -> Delta | None:
        """Where the slot differs from the newest version, written into memory of its own."""
        base = self._newest
        if base is None or base.layout != slot.layout:
            return None
        payload, word_bytes = slot.payload.flat, self.dtype.itemsize
        changes = delta.find(payload, base.payload.flat, word_bytes=word_bytes)
        if changes is None:
            return None
        num_changed = len(changes[0])
        num_bytes = delta.blob_bytes(num_changed, num_bytes=len(payload), word_bytes=word_bytes)
        slot.delta = self._outlet.allocate(num_bytes, device=payload.device)
        delta.write(changes, into=slot.delta.flat)
        return Delta(
            base=base.checksum,
            num_changed=num_changed,
            word_bytes=word_bytes,
            num_bytes=num_bytes,
            location="",
        )

    def _recycle(self, slot: _PayloadSlot | None) -> None:
        """Use it again, unless engines or the next delta still need it."""
        if slot is not None and slot is not self._newest and slot.version not in self._held:
            self._free.append(slot)
