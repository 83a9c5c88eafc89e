"""The weights an engine decodes with, and which version they are.

Promise: all or nothing. An update that does not fit is refused before anything is touched; one that
fails half-way leaves no version at all, until a complete one is in. Weights are written in place:
CUDA graphs and joined projections stay valid.

Used by the engine's thread, between two forward passes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import WeightError
from millrace.engines.embedded.adapter_bank import AdapterBank
from millrace.engines.embedded.merging import AdapterMerger


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
        # What an update must bring; made once, because every check of it makes decoding wait.
        self.shapes: dict[str, tuple[int, ...]] = (
            {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
            if adapter is None
            else adapter.shapes()
        )

    def replace(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._check(tensors, version=version)
        self.version = None
        try:
            self._take(tensors)
            if self._device.type == "cuda":
                # Whoever lent the tensors may take them back when this returns.
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise WeightError(
                f"Version {version} was applied only in part ({error}); the engine serves nothing"
                " until a complete version is in."
            ) from error
        self.version = version

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        if self._merger is not None:
            self._merger.merge(tensors, into=self._parameters)
        elif self._bank is not None and self._bank.policy is not None:
            self._bank.update(tensors)
        else:
            self._copy(tensors)
            if self._bank is not None:
                self._bank.weights_changed()

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        names = list(self._parameters)
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage] - has no public name
            [self._parameters[name] for name in names], [tensors[name] for name in names]
        )

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
