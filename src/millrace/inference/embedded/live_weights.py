"""The weights that an engine decodes with, and their version; or the adapters of several policies,
and the version of each.

Promise: all or nothing. An update that does not fit, or cannot be prepared, is refused before any
weight changes. An update that fails half-way leaves no version until a complete one is committed.
Weights are written in place, so CUDA graphs and fused projections stay valid.

A staging thread calls prepare(), which does as much as possible while decoding continues: it also
quantises what layers hold in FP8, so a commit copies fewer bytes. The
engine's thread calls commit() between two forward passes: one operation for all tensors of a dtype.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import WeightError
from millrace.core.records import DEFAULT_POLICY
from millrace.inference.embedded.adapters import AdapterBank, AdapterMerger
from millrace.inference.embedded.decode.fused_linear import row_scales_of
from millrace.inference.embedded.fp8 import FP8, quantize_rows
from millrace.models.routing import policy_tensors
from millrace.weights.packing import check_shapes, copy_all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedWeights:
    """A complete version, to be committed or dropped. Several may exist."""

    version: int
    pairs: list[tuple[Tensor, Tensor]]  # live tensors, and their new values; none if they stay
    policy: str | None = None  # a further one, whose adapter this is


def name_of(policy: str) -> str | None:
    """The adapter of a policy: that of the only or first one has no name."""
    return None if policy == DEFAULT_POLICY else policy


class LiveWeights:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int,
        merger: AdapterMerger | None,
        bank: AdapterBank | None,
        stages: bool = True,
    ) -> None:
        """`version`: of the model's weights. With a `merger`, or a `bank` that holds the policy's
        adapter, updates are adapters. `stages`: prepare() copies whole models to the device; else
        commit() does, which takes longer and needs no room for a second copy."""
        names = [] if bank is None else bank.policies
        # By policy, where None is the only or first; None after an update that failed half-way.
        self.versions: dict[str | None, int | None] = dict.fromkeys([None, *names], version)
        self._device, self._parameters = model.device, policy_tensors(model)
        self._row_scales = row_scales_of(model)
        self._merger, self._bank, self._stages = merger, bank, stages
        policy = bank and bank.policy if merger is None else merger.adapter
        shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        # Shapes of the tensors that an update must bring.
        self.shapes: dict[str, tuple[int, ...]] = policy.shapes() if policy else shapes
        # Decoding uses the device's default stream.
        self._stream = torch.cuda.Stream(model.device) if self._device.type == "cuda" else None

    @property
    def version(self) -> int | None:
        """The version of the first policy; None if a policy has no complete version."""
        return None if None in self.versions.values() else self.versions[None]

    @property
    def slot_versions(self) -> np.ndarray:  # [slots of the bank + 1] int64
        """The version of rows with each adapter; every version is complete."""
        names = [] if self._bank is None else self._bank.names
        return np.array([self.versions.get(name, self.versions[None]) for name in [*names, None]])

    def prepare(
        self, tensors: Mapping[str, Tensor], *, version: int, policy: str | None = None
    ) -> PreparedWeights:
        """The tensors are complete: on a GPU, no stream still writes to them."""
        given = {name: tensor.shape for name, tensor in tensors.items()}
        check_shapes(given, expected=self.shapes, version=version)
        try:
            with torch.cuda.stream(self._stream):  # no effect if None
                pairs = self._pairs(tensors, policy)
            if self._stream is not None:
                # Decoding continues meanwhile, and commit() does not have to wait.
                self._stream.synchronize()
        except RuntimeError as error:
            raise WeightError(
                f"Version {version} cannot be prepared ({error}); the engine keeps its weights."
            ) from error
        return PreparedWeights(version=version, pairs=pairs, policy=policy)

    def commit(self, prepared: PreparedWeights) -> None:
        self.versions[prepared.policy] = None
        try:
            if prepared.pairs:
                copy_all(*zip(*prepared.pairs, strict=True))
            if self._device.type == "cuda":
                # The sender may reuse the memory of the tensors once this returns.
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise WeightError(
                f"Version {prepared.version} was applied only in part ({error}); the engine serves"
                " nothing until a complete version is in."
            ) from error
        self.versions[prepared.policy] = prepared.version

    def _pairs(
        self, tensors: Mapping[str, Tensor], policy: str | None
    ) -> list[tuple[Tensor, Tensor]]:
        bank = self._bank
        if bank is not None and bank.policy is not None:
            return bank.prepare(tensors, name=policy)
        values: Iterable[tuple[str, Tensor]] = ((name, tensors[name]) for name in self._parameters)
        if self._merger is not None:
            values = self._merger.merged(tensors)
        pairs = [pair for name, value in values for pair in self._staged(name, value)]
        return pairs if bank is None else pairs + bank.prepare_gains(tensors)

    def _staged(self, name: str, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        own = self._parameters[name]
        if own.dtype != FP8:
            return [(own, value.to(own.device, own.dtype) if self._stages else value)]
        values, scales = quantize_rows(value.to(own.device))
        # Eight at a time: single bytes are copied at a fraction of the memory's bandwidth.
        words = own.view(torch.int64), values.view(torch.int64)
        return [words, (self._row_scales[name], scales)]
