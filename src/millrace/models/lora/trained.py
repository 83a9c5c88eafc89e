"""An adapter in training: created by PEFT and saved as a PEFT folder.

Promise: PeftModel.from_pretrained loads what write() wrote.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace.config import LoraConfig
from millrace.core.errors import CheckpointError
from millrace.models.lora.factors import adapter_of, factors_of, merged, require_peft, tensor_names
from millrace.models.lora.folders import NAME_PREFIX, WEIGHTS_FILE, read_checkpoint
from millrace.models.sharding import whole, whole_units

_ADAPTER = "default"  # PEFT's name of a model's only adapter


class TrainedAdapter:
    """An adapter in a model whose base weights are frozen. Used by one thread."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, *, model_path: str) -> None:
        """Add an adapter to `model`, loaded from `model_path`. B is 0: its output is unchanged."""
        require_peft()
        import peft

        self._adapter = adapter_of(model, lora)
        names = sorted(self._adapter.layers)
        is_local = Path(model_path).exists()
        self._settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - a quotient of it is used
            target_modules=names,
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            base_model_name_or_path=str(Path(model_path).absolute()) if is_local else model_path,
        )
        targets = {id(model.get_submodule(name)): name for name in names}
        for unit in whole_units(model) if lora.dora else [model]:  # DoRA reads the weights
            here = [targets[id(module)] for module in unit.modules() if id(module) in targets]
            if here:
                settings = replace(self._settings, target_modules=here)
                peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
            targets = {key: name for key, name in targets.items() if name not in here}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        model.eval()  # new modules start in train mode
        self._model = model
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}

    def named_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        is_dora = self._adapter.is_dora
        for name, layer in self._layers.items():
            parts = [layer.lora_A, layer.lora_B]
            if is_dora:
                parts.append(layer.lora_magnitude_vector)
            for tensor, part in zip(tensor_names(name, dora=is_dora), parts, strict=True):
                weights[tensor] = part[_ADAPTER].weight.detach()
        return weights

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model computes without the adapter."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Save a copy of named_weights() as a PEFT folder. Any thread may call this."""
        self._settings.save_pretrained(str(folder))
        tensors = {f"{NAME_PREFIX}{name}": weight.cpu() for name, weight in weights.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Load the weights that write() wrote."""
        saved, own = read_checkpoint(folder), self.named_weights()
        for name in sorted(saved.keys() | own.keys()):
            if name not in saved or name not in own or saved[name].shape != own[name].shape:
                raise CheckpointError(
                    f"The adapter in {str(folder)!r} does not match [lora]: they differ in"
                    f" {name!r}; resume with the settings it was trained with."
                )
            own[name].copy_(saved[name])

    def merged_weights(self) -> dict[str, Tensor]:
        """Weights of the model with the adapter merged, by the names of the base model."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            layer, is_own, ending = name.partition(".base_layer.")
            if is_own and layer in self._layers:
                weights[f"{layer}.{ending}"] = whole(tensor)
            elif name.partition(".lora_")[0] not in self._layers:
                weights[name] = whole(tensor)
        adapter, tensors = self._adapter, self.named_weights()
        for name, layer in self._layers.items():
            factors = factors_of(tensors, name, dora=adapter.is_dora)
            with torch.no_grad():
                weight = merged(whole(layer.base_layer.weight), factors, scale=adapter.scale)
            weights[f"{name}.weight"] = weight.cpu()
        return weights
