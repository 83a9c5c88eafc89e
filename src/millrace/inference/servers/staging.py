"""New weights on their way from Millrace's receiver to a server: Hugging Face directories, or
PEFT directories of an adapter.

Promise: a directory is complete before its path is used, and it is removed after its commit, or
when nothing refers to it any more.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from millrace.config import LoraConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.core.files import reason
from millrace.models.loading import empty_model, write_model
from millrace.models.lora import folders
from millrace.models.lora.factors import Adapter, adapter_of
from millrace.models.routing import policy_tensors
from millrace.weights.packing import check_shapes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedVersion:
    version: int
    folder: tempfile.TemporaryDirectory[str]
    is_adapter: bool


def weight_folder(model_path: str) -> str:
    """The folder of a model; of one on the hub, the folder in its cache, filled if it is not."""
    if Path(model_path).is_dir():
        return str(Path(model_path).absolute())
    try:
        return snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The weights of {model_path!r} cannot be passed to the server of engine.options.attach"
            f" ({type(error).__name__}); download the model, and set model.path to its folder."
        ) from error


class WeightStaging:
    def __init__(
        self,
        model_path: str,
        folder: Path,
        *,
        trust_remote_code: bool,
        lora: LoraConfig | None = None,
        engine_type: str,
    ) -> None:
        """`folder`: where versions are written; with `lora`, they are adapters."""
        self._model = empty_model(model_path, trust_remote_code=trust_remote_code)
        tensors = {name: tuple(p.shape) for name, p in policy_tensors(self._model).items()}
        self._lora = lora
        if lora is not None:
            tensors = _checked(adapter_of(self._model, lora), engine_type).shapes()
        self.shapes: dict[str, tuple[int, ...]] = tensors
        self._folder = folder

    def write_first(self, checkpoint: Path | None, *, version: int) -> StagedVersion:
        """The adapter that a run starts with: that of a checkpoint, or one that changes nothing."""
        zeros = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        first = zeros if checkpoint is None else folders.read_checkpoint(checkpoint)
        return self.write(first, version=version)

    def write(self, tensors: Mapping[str, Tensor], *, version: int) -> StagedVersion:
        """Any thread may call this."""
        given = {name: tensor.shape for name, tensor in tensors.items()}
        check_shapes(given, expected=self.shapes, version=version)
        folder = tempfile.TemporaryDirectory(prefix=f"{version}-", dir=self._folder)
        try:
            if self._lora is None:
                write_model(self._model, tensors, Path(folder.name))
            else:
                _write_adapter(self._lora, tensors, Path(folder.name))
        except (OSError, SafetensorError) as error:
            raise WeightError(
                f"Version {version} cannot be written to {str(self._folder)!r} ({reason(error)});"
                " free some space there, or set engine.options.directory."
            ) from error
        return StagedVersion(version=version, folder=folder, is_adapter=self._lora is not None)


def _checked(adapter: Adapter, engine_type: str) -> Adapter:
    """Raise ConfigError for an adapter that the server cannot apply."""
    experts = [name for name, shape in adapter.layers.items() if len(shape) == 3]
    if experts or adapter.is_dora:
        what = f"adapters of experts ({experts[0]})" if experts else "lora.dora = true"
        raise ConfigError(
            f"engine.type = {engine_type!r} cannot apply {what}; list the linear layers to adapt in"
            " lora.target_modules and set lora.dora to false, or choose another engine.type."
        )
    return adapter


def lora_layers(tensors: Iterable[str]) -> list[str]:
    """Names of the linear layers that an adapter with these tensors changes."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})


def _write_adapter(lora: LoraConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": lora_layers(tensors),
        "bias": "none",
    }
    (folder / folders.SETTINGS_FILE).write_text(json.dumps(settings))
    prefix = folders.NAME_PREFIX
    named = {f"{prefix}{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / folders.WEIGHTS_FILE)
