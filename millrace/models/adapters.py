"""LoRA: low-rank updates of a frozen model's linear layers, trained with PEFT.

Promise: trainer and engines agree on which layers are adapted, what the tensors are called, and
what an adapter does to a weight. The head is never adapted. Folders are PEFT's own:
PeftModel.from_pretrained loads them.

PEFT is needed where an adapter is made and trained; engines go by names and shapes alone.
R = rank; I, O = what a layer takes in and gives out.
"""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.config import ALL_LINEAR, LoraConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.models.loading import without_progress_bars

SETTINGS_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_IN_FILE = "base_model.model."  # before every name in PEFT's files
_ADAPTER = "default"  # PEFT's name for the only adapter of a model


def require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[lora] needs PEFT, which is not installed; install millrace[lora], or leave [lora] out"
            " to train all weights."
        )


def adapted_linears(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Linear]:
    """The layers the settings choose, by name."""
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }
    if not linears:
        raise ConfigError(
            f"[lora] finds no linear layers in {type(model).__name__}; leave it out to train all"
            " weights."
        )
    if ALL_LINEAR in lora.target_modules:
        return linears
    for target in lora.target_modules:
        if not any(_is_meant(name, target) for name in linears):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ConfigError(
                f"lora.target_modules has {target!r}, which is no layer that can be adapted; this"
                f" model has {known}."
            )
    return {
        name: linear
        for name, linear in linears.items()
        if any(_is_meant(name, target) for target in lora.target_modules)
    }


def _is_meant(name: str, target: str) -> bool:
    """PEFT's own rule for a list of names."""
    return name == target or name.endswith(f".{target}")


def tensor_names(layer: str) -> tuple[str, str]:
    """Of its factors A [R, I] and B [O, R]."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def scale_of(lora: LoraConfig) -> float:
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def merged(weight: Tensor, *, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[O, I] float32: what the layer's weight is with the adapter in it."""
    return torch.addmm(weight.float(), b, a, alpha=scale)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors that TrainedAdapter.save() wrote, on the host."""
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The adapter in {str(folder)!r} cannot be read ({type(error).__name__}); remove that"
            " checkpoint to resume from the one before it."
        ) from error
    return {name.removeprefix(_IN_FILE): tensor for name, tensor in tensors.items()}


def check_same_kind(folder: Path, lora: LoraConfig | None) -> None:
    """Refuse to resume from a checkpoint that was trained with other [lora] settings."""
    settings = folder / SETTINGS_FILE
    if lora is None:
        if settings.is_file():
            raise ConfigError(
                f"{str(folder)!r} holds a LoRA adapter; to resume, give [lora] as it was."
            )
        return
    if not settings.is_file():
        raise ConfigError(
            f"{str(folder)!r} was trained without LoRA; to resume, leave [lora] out, or train its"
            " model in a new run_dir."
        )
    try:
        saved = json.loads(settings.read_text())
        found = {"rank": saved["r"], "alpha": saved["lora_alpha"], "rslora": saved["use_rslora"]}
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(settings)!r} is damaged ({error}); remove that checkpoint to resume from the one"
            " before it."
        ) from error
    for key, value in found.items():
        if getattr(lora, key) != value:
            raise ConfigError(
                f"lora.{key} = {getattr(lora, key)}, but {str(folder)!r} was trained with {value};"
                " to resume, set it to that."
            )


class TrainedAdapter:
    """An adapter in a model whose own weights are frozen from here on. Used by one thread."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, *, model_path: str) -> None:
        """Changes `model`, at `model_path`, which computes what it did before: B is zero."""
        require_peft()
        import peft

        names = sorted(adapted_linears(model, lora))
        is_local = Path(model_path).exists()
        self._settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - a quotient of it is used
            target_modules=names,
            use_rslora=lora.rslora,
            base_model_name_or_path=str(Path(model_path).absolute()) if is_local else model_path,
        )
        peft.inject_adapter_in_model(self._settings, model, adapter_name=_ADAPTER)
        model.eval()  # what was put in starts in train mode
        self._model = model
        self._scale = scale_of(lora)
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}

    def named_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            for tensor, factor in zip(tensor_names(name), self._factors(layer), strict=True):
                weights[tensor] = factor.detach()
        return weights

    def save(self, folder: Path) -> None:
        self._settings.save_pretrained(str(folder))
        tensors = {f"{_IN_FILE}{n}": w.cpu() for n, w in self.named_weights().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Go on with what save() wrote."""
        saved, own = read_adapter(folder), self.named_weights()
        for name in sorted(saved.keys() | own.keys()):
            if name not in saved or name not in own or saved[name].shape != own[name].shape:
                raise CheckpointError(
                    f"The adapter in {str(folder)!r} is another one than [lora] describes: they"
                    f" differ in {name!r}; resume with the settings it was trained with."
                )
            own[name].copy_(saved[name])

    def save_merged(self, folder: Path) -> None:
        """Write the model with the adapter in its weights, as a Hugging Face directory."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            layer, is_own, ending = name.partition(".base_layer.")
            if is_own and layer in self._layers:
                weights[f"{layer}.{ending}"] = tensor
            elif name.partition(".lora_")[0] not in self._layers:
                weights[name] = tensor
        for name, layer in self._layers.items():
            a, b = self._factors(layer)
            with torch.no_grad():
                weight = merged(layer.base_layer.weight, a=a, b=b, scale=self._scale)
            weights[f"{name}.weight"] = weight.cpu()
        with without_progress_bars():
            self._model.save_pretrained(folder, state_dict=weights)

    @staticmethod
    def _factors(layer: Any) -> tuple[Tensor, Tensor]:
        return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
