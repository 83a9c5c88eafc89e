"""The engine's end of every transport: fetches a version, verifies it and returns its tensors.

Promise: all or nothing. stage() returns the complete, verified tensors of one version, or raises
WeightError and keeps what it holds. The tensors of a stage() are valid until the version is
released or two more were staged.

Used by one thread of the engine, beside the one that decodes.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, TensorSpec, WeightUpdate
from millrace.weights import packing
from millrace.weights.packing import checksum


class Fetched(NamedTuple):
    flat: torch.Tensor  # [num_bytes] uint8
    kind: Literal["mapped", "staged", "delta"]
    """mapped: the payload in the sender's memory; staged: in memory from Staging.take()."""


class Staging:
    """Memory for two payloads, filled in turn, so that the newest stays untouched."""

    def __init__(self) -> None:
        self.newest: torch.Tensor | None = None
        self._checksum: int | None = None  # of the newest
        self._layout: tuple[TensorSpec, ...] = ()
        self._spare: list[torch.Tensor] = []

    def is_base_of(self, update: WeightUpdate) -> bool:
        """Whether the delta of this update applies to the newest payload."""
        has_layout = self._checksum is not None and update.tensors == self._layout
        return has_layout and update.delta is not None and update.delta.base == self._checksum

    def take(self, update: WeightUpdate, *, device: torch.device | None = None) -> torch.Tensor:
        """Memory for its payload; zero between the tensors, undefined in them. `device`: of new
        memory; the same in all calls, the host if not given."""
        if update.tensors != self._layout:
            self.clear()
            self._layout = update.tensors
        if not self._spare:
            flat = torch.zeros(update.num_bytes, dtype=torch.uint8, device=device)
            self._spare.append(flat)
        return self._spare[-1]

    def keep(self, checksum: int) -> None:
        """The memory of the last take() now holds a payload, verified by this checksum."""
        flat = self._spare.pop()
        if self.newest is not None:
            self._spare.append(self.newest)
        self.newest, self._checksum = flat, checksum

    def clear(self) -> None:
        self._spare.clear()
        self.newest = self._checksum = None
        self._layout = ()


class RecvBackend:
    """How the bytes of an update arrive; what differs between transports."""

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        """The payload, in the backend's memory or in that of `staging`; or `delta`, which is the
        update's if the engine holds its base. The caller verifies it."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all memory and connections; fetch() may be called again."""


class StagingReceiver:
    """Engine side of a transport."""

    def __init__(
        self,
        backends: Mapping[str, Callable[[], RecvBackend]],
        *,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        keep_base: bool = False,
    ) -> None:
        """`backends`: the transports that it accepts, by name. `expected`: shapes by name that
        updates must have exactly. `dtype`: required type of floating-point tensors. `device`: where
        the engine computes. `keep_base`: keep a copy of the newest payload, to apply deltas to."""
        self._backends = backends
        self._expected = expected
        self._dtype = dtype
        self._keep_base = keep_base
        self._staging = Staging()
        self._transport: str | None = None
        self._backend: RecvBackend | None = None  # of that transport
        # On a GPU, staging runs beside decoding, which uses the device's default stream.
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        """Return the complete, verified tensors by name; raises WeightError otherwise."""
        self._check(update)
        with torch.cuda.stream(self._stream):  # does nothing without one
            tensors = self._stage(update)
        if self._stream is not None:
            self._stream.synchronize()
        return tensors

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        self._staging.clear()

    def _stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        if self._backend is None or update.transport != self._transport:
            self.close()
            self._transport, self._backend = update.transport, self._backends[update.transport]()
        delta = update.delta if self._keep_base and self._staging.is_base_of(update) else None
        payload, kind = self._backend.fetch(update, delta=delta, staging=self._staging)
        is_staged = kind != "mapped" or self._keep_base
        if kind == "delta":
            blob, newest = payload, self._staging.newest
            assert delta is not None
            assert newest is not None
            payload = self._staging.take(update, device=newest.device)
            packing.apply_delta(
                blob, delta=delta, base=newest, into=payload, version=update.version
            )
        elif kind == "mapped" and self._keep_base:
            payload = self._staging.take(update).copy_(payload)
        if checksum(payload) != update.checksum:
            raise WeightError(
                f"The bytes of version {update.version} do not match their checksum;"
                " the engine keeps the weights it has."
            )
        if is_staged:
            self._staging.keep(update.checksum)
        return packing.unpack(update.tensors, payload)

    def _check(self, update: WeightUpdate) -> None:
        if update.transport not in self._backends:
            known = " or ".join(repr(name) for name in self._backends)
            raise WeightError(
                f"Version {update.version} uses the transport {update.transport!r}, but this engine"
                f" uses {known}; give all workers the same weights.transport."
            )
        packing.check_manifest(update.tensors, num_bytes=update.num_bytes)
        if update.delta is not None:
            packing.check_delta(update, update.delta)
        if self._expected is not None:
            packing.check_fits(update.tensors, expected=self._expected, dtype=self._dtype)
