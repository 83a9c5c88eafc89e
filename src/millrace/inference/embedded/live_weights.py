"""The weights an engine decodes with, and which version they are.

Promise: all or nothing. An update that does not fit, or cannot be made ready, is refused before
anything is touched; one that fails half-way leaves no version at all, until a complete one is in.
Weights are written in place: CUDA graphs and joined projections stay valid.

prepare() does everything that can be done beside decoding, in a thread of its own; commit() is
called by the engine's thread between two forward passes, and is one call for all tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import WeightError
from millrace.inference.embedded.lora.bank import AdapterBank, AdapterMerger


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedWeights:
    """A complete version on the engine's device, to be committed or dropped.

    What of it is not lent by whoever brought the update is its own: several may exist at a time.
    """

    version: int
    targets: list[Tensor]  # what decodes
    sources: list[Tensor]  # what takes its place, in the same order


class LiveWeights:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int,
        merger: AdapterMerger | None,
        bank: AdapterBank | None,
    ) -> None:
        """`version`: of what the model holds. With a `merger`, or a `bank` that holds the policy's
        adapter, updates are adapters."""
        self.version: int | None = version  # None after an update that failed half-way
        self._device = model.device
        self._parameters = dict(model.named_parameters())
        self._merger = merger
        self._bank = bank
        adapter = (
            merger.adapter if merger is not None else bank.policy if bank is not None else None
        )
        # What an update must bring.
        self.shapes: dict[str, tuple[int, ...]] = (
            {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
            if adapter is None
            else adapter.shapes()
        )
        # Decoding has the device's default stream.
        self._stream = torch.cuda.Stream(model.device) if self._device.type == "cuda" else None

    def prepare(self, tensors: Mapping[str, Tensor], *, version: int) -> PreparedWeights:
        """Of tensors that are complete: on a GPU, nothing on any stream still writes to them."""
        self._check(tensors, version=version)
        try:
            with torch.cuda.stream(self._stream):  # does nothing without one
                pairs = self._pairs(tensors)
            if self._stream is not None:
                # Here, beside decoding, so that commit() has nothing to wait for.
                self._stream.synchronize()
        except RuntimeError as error:
            raise WeightError(
                f"Version {version} cannot be made ready ({error}); the engine keeps the weights it"
                " has."
            ) from error
        targets, sources = (list(side) for side in zip(*pairs, strict=True))
        return PreparedWeights(version=version, targets=targets, sources=sources)

    def commit(self, prepared: PreparedWeights) -> None:
        self.version = None
        try:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage] - no public name
                prepared.targets, prepared.sources
            )
            if self._device.type == "cuda":
                # Whoever lent the tensors may take them back when this returns.
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise WeightError(
                f"Version {prepared.version} was applied only in part ({error}); the engine serves"
                " nothing until a complete version is in."
            ) from error
        self.version = prepared.version

    def _pairs(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of live and new tensor."""
        if self._merger is not None:
            return self._merger.prepare(tensors, live=self._parameters)
        if self._bank is not None and self._bank.policy is not None:
            return self._bank.prepare(tensors)
        pairs: list[tuple[Tensor, Tensor]] = [
            (parameter, tensors[name].to(parameter.device, parameter.dtype))
            for name, parameter in self._parameters.items()
        ]
        return pairs if self._bank is None else pairs + self._bank.prepare_gains(tensors)

    def _check(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        expected = self.shapes
        if missing := sorted(expected.keys() - tensors.keys()):
            raise WeightError(f"Version {version} lacks {missing[0]!r} ({len(missing)} missing).")
        if unknown := sorted(tensors.keys() - expected.keys()):
            raise WeightError(f"Version {version} has {unknown[0]!r}, which the model has not.")
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                raise WeightError(
                    f"Version {version} has {name!r} as {tuple(tensors[name].shape)};"
                    f" the model's is {shape}."
                )
