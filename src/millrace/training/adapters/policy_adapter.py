"""An adapter of one policy in a model that several policies share.

Promise: it computes, trains and saves what a TrainedAdapter does, and several of them may change
the rows of one pass (adapted_model.py). Used by one thread.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.config import LoraConfig
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.folders import write_folder
from millrace.models.lora.trained import TrainedAdapter
from millrace.training.adapters.adapted_model import AdaptedModel, initial_factors


class PolicyAdapter(TrainedAdapter):
    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraConfig,
        *,
        model_path: str,
        adapted: AdaptedModel,  # over `model`, shared by all policies
        seed: int,
    ) -> None:
        self.adapted = adapted
        self._model, self._lora = model, lora
        self._path = str(Path(model_path).absolute()) if Path(model_path).exists() else model_path
        self._adapter = adapter_of(model, lora)
        generator = torch.Generator().manual_seed(seed)
        self._factors = initial_factors(self._adapter, generator=generator, device=model.device)
        # Names of parameters have no dots, and those of an optimizer's state come from here.
        self.trained = nn.ParameterDict(
            {name.replace(".", "/"): factor for name, factor in self._factors.items()}
        )
        self._is_enabled = True

    @property
    def applied(self) -> tuple[Mapping[str, Tensor], float]:
        """The factors and their scale, for AdaptedModel.applied()."""
        return self._factors, self._adapter.scale

    def named_weights(self) -> dict[str, Tensor]:
        return {name: factor.detach() for name, factor in self._factors.items()}

    def changing(self, num_rows: int) -> AbstractContextManager[None]:
        return (
            self.adapted.applied([self.applied], [num_rows]) if self._is_enabled else nullcontext()
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        lora = self._lora
        layout, alpha = self._adapter, lora.alpha
        write_folder(
            folder, weights, layout=layout, alpha=alpha, path=self._path, rslora=lora.rslora
        )
