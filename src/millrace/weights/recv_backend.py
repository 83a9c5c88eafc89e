"""The engine's end of every transport: fetches a version, verifies it and returns its tensors.

Promise: all or nothing. stage() returns the complete, verified tensors of one version, or raises
WeightError and keeps what it holds. The tensors of a stage() are valid until the version is
released or two more were staged.

A RecvBackend is what differs between transports: how the bytes arrive. It fetches the full payload
or, if the engine holds its base, the delta.

Used by one thread of the engine, beside the one that decodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from millrace.core.errors import WeightError
from millrace.core.records import TensorSpec, WeightUpdate
from millrace.weights import delta, packing
from millrace.weights.checksum import checksum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fetched:
    flat: torch.Tensor  # [num_bytes] uint8
    kind: Literal["mapped", "staged", "delta"]
    """mapped: the payload in the sender's memory; staged: in memory from Staging.take()."""


class Staging:
    """Memory for two payloads, filled in turn, so that the newest stays untouched."""

    def __init__(self) -> None:
        self._layout: tuple[TensorSpec, ...] = ()
        self._spare: list[torch.Tensor] = []
        self._newest: torch.Tensor | None = None
        self._checksum: int | None = None  # of the newest

    def base_for(self, update: WeightUpdate) -> int | None:
        """Checksum of the newest payload, if it has the layout of this update."""
        return self._checksum if update.tensors == self._layout else None

    @property
    def newest(self) -> torch.Tensor:
        assert self._newest is not None
        return self._newest

    def take(self, update: WeightUpdate, *, device: torch.device | None = None) -> torch.Tensor:
        """Memory for its payload; zero between the tensors, undefined in them. `device`: of new
        memory; the same in all calls, the host if not given."""
        if update.tensors != self._layout:
            self._layout = update.tensors
            self._spare.clear()
            self._newest = self._checksum = None
        if not self._spare:
            flat = torch.zeros(update.num_bytes, dtype=torch.uint8, device=device)
            self._spare.append(flat)
        return self._spare[-1]

    def keep(self, checksum: int) -> None:
        """The memory of the last take() now holds a payload, verified by this checksum."""
        flat = self._spare.pop()
        if self._newest is not None:
            self._spare.append(self._newest)
        self._newest, self._checksum = flat, checksum

    def clear(self) -> None:
        self._spare.clear()
        self._newest = self._checksum = None
        self._layout = ()


class RecvBackend(Protocol):
    transport: str

    def fetch(self, update: WeightUpdate, *, base: int | None, staging: Staging) -> Fetched:
        """The payload, in the backend's memory or in that of `staging`; or the delta, if `base` is
        its base. The caller verifies it."""
        ...

    def close(self) -> None: ...


class StagingReceiver:
    def __init__(
        self,
        backend: RecvBackend,
        *,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        keep_base: bool = False,
    ) -> None:
        """`expected`: shapes by name that updates must have exactly. `dtype`: required type of
        floating-point tensors. `device`: where the engine computes. `keep_base`: keep a copy of the
        newest payload, to apply deltas to."""
        self._backend = backend
        self._expected = expected
        self._dtype = dtype
        self._keep_base = keep_base
        self._staging = Staging()
        # On a GPU, staging runs beside decoding, which uses the device's default stream.
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        self._check(update)
        with torch.cuda.stream(self._stream):  # does nothing without one
            tensors = self._stage(update)
        if self._stream is not None:
            self._stream.synchronize()
        return tensors

    def close(self) -> None:
        self._backend.close()
        self._staging.clear()

    def _stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        base = self._staging.base_for(update) if self._keep_base else None
        fetched = self._backend.fetch(update, base=base, staging=self._staging)
        payload = fetched.flat
        if fetched.kind == "delta":
            assert update.delta is not None
            newest = self._staging.newest
            payload = self._staging.take(update, device=newest.device)
            delta.apply(fetched.flat, update, delta=update.delta, base=newest, into=payload)
        elif fetched.kind == "mapped" and self._keep_base:
            payload = self._staging.take(update).copy_(fetched.flat)
        if checksum(payload) != update.checksum:
            raise WeightError(
                f"The bytes of version {update.version} do not match their checksum;"
                " the engine keeps the weights it has."
            )
        if payload is not fetched.flat or fetched.kind == "staged":
            self._staging.keep(update.checksum)
        return packing.unpack(update.tensors, payload)

    def _check(self, update: WeightUpdate) -> None:
        if update.transport != self._backend.transport:
            raise WeightError(
                f"Version {update.version} uses the transport {update.transport!r}, but this engine"
                f" uses {self._backend.transport!r}; give all workers the same weights.transport."
            )
        packing.check_manifest(update.tensors, num_bytes=update.num_bytes)
        if update.delta is not None:
            delta.check(update, update.delta)
        if self._expected is not None:
            packing.check_fits(update.tensors, expected=self._expected, dtype=self._dtype)
