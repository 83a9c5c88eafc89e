"""Both ends of every transport: the trainer packs each version, engines fetch and verify it.

Promise: publish() returns when engines can fetch the complete version. Its memory is not written
again before the version is released. At most MAX_HELD versions are held at a time. stage() returns
the complete, verified tensors of one version, or raises WeightError and keeps what it holds; they
are valid until the version is released or two more were staged.

With payload = "delta" the newest payload is kept, so that the next version can also be sent as its
difference. The full payload is always available, for an engine that holds another version.

Each end is used by one thread; the engine's is beside the one that decodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, SwapProbe, TensorSpec, WeightUpdate
from millrace.weights import packing
from millrace.weights.packing import checksum

MAX_HELD = 3
Payload = Literal["full", "delta"]
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
        """Withdraw all versions, and free everything except the memory that it allocated."""


@dataclass(kw_only=True, slots=True, eq=False)
class PayloadSlot:
    """Memory for one version, reused for versions of the same layout. The bytes between two tensors
    stay zero, so equal weights are equal bytes."""

    layout: tuple[TensorSpec, ...]
    payload: Memory
    views: dict[str, torch.Tensor]  # of the payload; an adapter's hundreds take milliseconds
    version: int = -1
    checksum: int = 0
    delta: Memory | None = None

    def drop_delta(self) -> None:
        if self.delta is not None:
            self.delta.close()
            self.delta = None

    def close(self) -> None:
        self.drop_delta()
        self.views.clear()  # they keep the memory
        self.payload.close()


def _pack(tensors: Mapping[str, torch.Tensor], slot: PayloadSlot) -> None:
    packing.pack(tensors, slot.views)


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
        self._layout: tuple[TensorSpec, ...] = ()  # of the last version, and what it was made for
        self._layout_of: list[tuple[str, torch.Size, torch.dtype]] | None = None
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        """False while MAX_HELD versions are not released."""
        return len(self._held) < MAX_HELD

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        pack: Callable[[Mapping[str, torch.Tensor], PayloadSlot], None] = _pack,
    ) -> WeightUpdate:
        """`pack` is another function if the tensors are sharded over ranks."""
        if version in self._held:
            raise WeightError(f"Version {version} is already published.")
        if not self.has_room:
            raise WeightError(
                f"Versions {sorted(self._held)} fill all {MAX_HELD} slots;"
                " release one before publishing the next."
            )
        found = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if found != self._layout_of:
            self._layout, self._num_bytes = packing.lay_out(tensors, dtype=self.dtype)
            self._layout_of = found
        specs, num_bytes = self._layout, self._num_bytes
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        slot = self._take(specs, num_bytes, device=device)
        try:
            pack(tensors, slot)
            update = WeightUpdate(
                version=version,
                tensors=specs,
                num_bytes=num_bytes,
                checksum=packing.checksum(slot.payload.flat),
                transport=self.backend.transport,
                location=slot.payload.location,
                delta=self._find_delta(slot),
                probe=None if self.reference is None else self.reference(slot.views),
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
        self.__post_init__()

    def _take(
        self, layout: tuple[TensorSpec, ...], num_bytes: int, *, device: torch.device
    ) -> PayloadSlot:
        """A free slot of this layout. Slots of another layout are closed: the model changed."""
        while self._free:
            slot = self._free.pop(0)
            if slot.layout == layout:
                return slot
            slot.close()
        payload = self.backend.allocate(num_bytes, device=device)
        views = packing.unpack(layout, payload.flat)
        return PayloadSlot(layout=layout, payload=payload, views=views)

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
        # A version that was released may be held in another slot: it is published again for a loan.
        if slot is None or slot is self._newest or self._held.get(slot.version) is slot:
            return
        self._free.append(slot)


class Fetched(NamedTuple):
    flat: torch.Tensor  # [num_bytes] uint8
    kind: Literal["mapped", "staged", "delta"]
    """mapped: the payload in the sender's memory; staged: in memory from Staging.take()."""


class StagedPayload(NamedTuple):
    flat: torch.Tensor  # [num_bytes] uint8
    views: dict[str, torch.Tensor]


class Staging:
    """Memory for two payloads, filled in turn, so that the newest stays untouched."""

    def __init__(self) -> None:
        self._newest: StagedPayload | None = None
        self._checksum: int | None = None  # of the newest
        self._layout: tuple[TensorSpec, ...] = ()
        self._spare: list[StagedPayload] = []

    @property
    def newest(self) -> torch.Tensor | None:
        return None if self._newest is None else self._newest.flat

    def applicable_delta(self, update: WeightUpdate) -> Delta | None:
        """The delta of this update, if it applies to the newest payload."""
        delta, has_layout = update.delta, update.tensors == self._layout
        return delta if delta and has_layout and delta.base == self._checksum else None

    def take(self, update: WeightUpdate, *, device: torch.device | None = None) -> torch.Tensor:
        """Memory for its payload; zero between the tensors, undefined in them. `device`: of new
        memory; the same in all calls, the host if not given."""
        if update.tensors != self._layout:
            self.clear()
            self._layout = update.tensors
        if not self._spare:
            flat = torch.zeros(update.num_bytes, dtype=torch.uint8, device=device)
            self._spare.append(StagedPayload(flat, packing.unpack(self._layout, flat)))
        return self._spare[-1].flat

    def keep(self, checksum: int) -> dict[str, torch.Tensor]:
        """The memory of the last take() now holds a payload, verified by this checksum; returns its
        tensors."""
        payload = self._spare.pop()
        if self._newest is not None:
            self._spare.append(self._newest)
        self._newest, self._checksum = payload, checksum
        return dict(payload.views)

    def clear(self) -> None:
        self._spare.clear()
        self._newest = self._checksum = None
        self._layout = ()


class RecvBackend:
    """How the bytes of an update arrive; what differs between transports."""

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        """The payload, in the backend's memory or in that of `staging`; or `delta`, which is the
        update's if the engine holds its base. The caller verifies it."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all memory and connections; fetch() may be called again."""


class Transport:
    """A transport that settings name by its class, which is called without arguments."""

    def sender(self, *, directory: Path) -> SendBackend:
        """The end of the trainer. `directory`: weights.directory, or weights/ in run_dir."""
        raise NotImplementedError

    def receiver(self, *, device: torch.device) -> RecvBackend:
        """The end of an engine, which wants the weights on `device`."""
        raise NotImplementedError


@dataclass(eq=False)
class StagingReceiver:
    """Engine side of a transport."""

    backends: Mapping[str, Callable[[], RecvBackend]]  # the transports that it accepts, by name
    _: KW_ONLY
    expected: Mapping[str, tuple[int, ...]] | None = None  # shapes that updates must have exactly
    dtype: torch.dtype | None = None  # required type of floating-point tensors
    device: torch.device | None = None  # where the engine computes
    keep_base: bool = False  # keep a copy of the newest payload, to apply deltas to

    def __post_init__(self) -> None:
        self._staging = Staging()
        self._checked: tuple[tuple[TensorSpec, ...], int] | None = None  # layout of the last update
        self._transport: str | None = None
        self._backend: RecvBackend | None = None  # of that transport
        # On a GPU, staging runs beside decoding, which uses the device's default stream.
        on_gpu = self.device is not None and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        """Return the complete, verified tensors by name; raises WeightError otherwise."""
        self._check(update)
        with torch.cuda.stream(self._stream):  # does nothing without one
            tensors = self._stage(update)
        if self._stream is not None:
            self._stream.synchronize()
        return tensors

    def forget(self) -> None:
        """Free the memory of staged payloads; the next update is fetched in full."""
        self._staging.clear()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self._staging.clear()

    def _stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        if self._backend is None or update.transport != self._transport:
            self.close()
            self._transport, self._backend = update.transport, self.backends[update.transport]()
        delta = self._staging.applicable_delta(update) if self.keep_base else None
        payload, kind = self._backend.fetch(update, delta=delta, staging=self._staging)
        is_staged = kind != "mapped" or self.keep_base
        if kind == "delta":
            blob, newest = payload, self._staging.newest
            assert delta is not None
            assert newest is not None
            payload = self._staging.take(update, device=newest.device)
            packing.apply_delta(
                blob, delta=delta, base=newest, into=payload, version=update.version
            )
        elif kind == "mapped" and self.keep_base:
            payload = self._staging.take(update).copy_(payload)
        if checksum(payload) != update.checksum:
            raise WeightError(
                f"The bytes of version {update.version} do not match their checksum;"
                " the engine keeps the weights it has."
            )
        if is_staged:
            return self._staging.keep(update.checksum)
        return packing.unpack(update.tensors, payload)

    def _check(self, update: WeightUpdate) -> None:
        if update.transport not in self.backends:
            known = " or ".join(repr(name) for name in self.backends)
            raise WeightError(
                f"Version {update.version} uses the transport {update.transport!r}, but this engine"
                f" uses {known}; give all workers the same weights.transport."
            )
        if update.delta is not None:
            packing.check_delta(update, update.delta)
        if (layout := (update.tensors, update.num_bytes)) == self._checked:
            return
        packing.check_manifest(update.tensors, num_bytes=update.num_bytes)
        if self.expected is not None:
            given = {spec.name: spec.shape for spec in update.tensors}
            packing.check_shapes(given, expected=self.expected, version=update.version)
        if self.dtype is not None:
            packing.check_dtypes(update.tensors, dtype=self.dtype)
        self._checked = layout
