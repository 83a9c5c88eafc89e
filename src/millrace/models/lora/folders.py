"""Reads and writes PEFT adapter folders without PEFT.

Promise: an adapter that would not compute here what it computes in PEFT is refused in one sentence
that names it.

PEFT wraps the module of experts once for each adapted parameter, so the tensors of the first one
lie deepest: `experts.base_layer.lora_A.weight`. It stores A as [E R, I] and B as [O, R E]. We name
tensors after the parameter, as for linear layers, and store A as [E, R, I] and B as [E, O, R].

E = experts, R = rank, I and O = input and output size.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace.config import LoraConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.models.lora.factors import EXPERT_WEIGHTS, Adapter, adaptable_layers, scale_of

SETTINGS_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."  # prefix of every tensor name in PEFT's files
_A, _B = ".lora_A.weight", ".lora_B.weight"
_WRAPPER = ".base_layer"
# Settings that change what a layer computes, and their values for plain LoRA or DoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
    # Other initializations also change the weights of the base model.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# What reading tensors raises; RuntimeError if shapes do not fit each other.
_UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, RuntimeError)


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """The tensors of a trained adapter, on the host."""
    try:
        return _read_tensors(folder)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"The adapter in {str(folder)!r} cannot be read ({type(error).__name__}); remove that"
            " checkpoint to resume from the one before it."
        ) from error


def check_same_kind(folder: Path, lora: LoraConfig | None) -> None:
    """Refuse to resume from a checkpoint that was trained with other [lora] settings."""
    settings = folder / SETTINGS_FILE
    if lora is None:
        if settings.is_file():
            raise ConfigError(
                f"{str(folder)!r} holds a LoRA adapter; to resume, add the [lora] table again."
            )
        return
    if not settings.is_file():
        raise ConfigError(
            f"{str(folder)!r} was trained without LoRA; to resume, leave [lora] out, or train its"
            " model in a new run_dir."
        )
    keys = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
    try:
        saved = json.loads(settings.read_text())
        found = {key: saved[theirs] for key, theirs in keys.items()}
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


def check_resident(name: str, folder: Path) -> dict[str, Any]:
    """The PEFT settings of an engine's adapter; raises ConfigError if engines cannot apply it."""
    setting = f"engine.adapters.{name} = {str(folder)!r}"
    for file in (SETTINGS_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ConfigError(f"{setting} has no {file}; set it to a folder that PEFT saved.")
    try:
        saved = json.loads((folder / SETTINGS_FILE).read_text())
        kind = saved["peft_type"], saved["r"], saved["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting} has a damaged {SETTINGS_FILE} ({error}); save the adapter again."
        ) from error
    if kind[0] != "LORA":
        raise ConfigError(f"{setting} holds an adapter of type {kind[0]}; only LORA can be served.")
    for key, plain in _PLAIN.items():
        if key in saved and saved[key] not in plain:
            raise ConfigError(
                f"{setting} was made with {key} = {saved[key]!r}, which engines cannot apply; merge"
                " it into a model, or train it without that setting."
            )
    return saved


def read_resident(name: str, folder: Path, *, model: PreTrainedModel) -> Adapter:
    """An engine's adapter, checked against its model; projections are not fused yet."""
    saved = check_resident(name, folder)
    setting = f"engine.adapters.{name} = {str(folder)!r}"
    try:
        tensors = _read_tensors(folder)
    except _UNREADABLE as error:
        raise ConfigError(
            f"{setting} cannot be read ({type(error).__name__}); save the adapter again."
        ) from error
    known = adaptable_layers(model)
    layers = dict.fromkeys(tensor.partition(".lora_")[0] for tensor in tensors)
    if not layers:
        raise ConfigError(f"{setting} has no tensors; save the adapter again.")
    for layer in layers:
        if layer not in known:
            raise ConfigError(
                f"{setting} adapts {layer!r}, which is not a linear layer of this model, or is its"
                " head; use an adapter that was trained on this model."
            )
    adapter = Adapter(
        layers={layer: known[layer] for layer in known if layer in layers},
        rank=saved["r"],
        scale=scale_of(saved["lora_alpha"], rank=saved["r"], rslora=bool(saved.get("use_rslora"))),
        is_dora=bool(saved.get("use_dora")),
        tensors=tensors,
    )
    expected = adapter.shapes()
    for tensor in sorted(tensors.keys() | expected.keys()):
        if tensor not in expected:
            raise ConfigError(
                f"{setting} has the tensor {tensor!r}, which does not belong to LoRA or DoRA;"
                " only those can be served."
            )
        if tensor not in tensors:
            raise ConfigError(f"{setting} lacks the tensor {tensor!r}; save the adapter again.")
        if tensors[tensor].shape != expected[tensor]:
            raise ConfigError(
                f"{setting} has {tensor!r} as {tuple(tensors[tensor].shape)}, where this model"
                f" needs {expected[tensor]}; use an adapter that was trained on this model."
            )
    return adapter


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    loaded = load_file(folder / WEIGHTS_FILE)
    tensors = {name.removeprefix(NAME_PREFIX): tensor for name, tensor in loaded.items()}
    saved = json.loads((folder / SETTINGS_FILE).read_text())
    return from_peft(tensors, targets=saved.get("target_parameters") or (), rank=saved["r"])


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    layout: Adapter,
    alpha: float,
    path: str,
    rslora: bool = False,
) -> None:
    """Save an adapter as PEFT does. `path`: of its base model."""
    experts = sorted(layer for layer, size in layout.layers.items() if len(size) == 3)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": path,
        "r": layout.rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "use_dora": False,
        "target_modules": sorted(layout.layers.keys() - set(experts)),
        "target_parameters": experts or None,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    named = {f"{NAME_PREFIX}{name}": t.cpu().contiguous() for name, t in to_peft(tensors).items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names and in its shapes."""
    adapted = [name.removesuffix(_A) for name, t in tensors.items() if t.ndim == 3 and _A in name]
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            renamed[name] = tensor
            continue
        layer, _, part = name.partition(".lora_")
        module, _, weight = layer.rpartition(".")
        own = _wrapped(module, adapted)
        depth = len(own) - 1 - own.index(weight)
        if part.startswith("A"):
            tensor = tensor.flatten(0, 1)
        else:
            tensor = tensor.permute(1, 2, 0).flatten(1)
        renamed[f"{module}{_WRAPPER * depth}.lora_{part}"] = tensor.contiguous()
    return renamed


def from_peft(
    tensors: Mapping[str, Tensor], *, targets: Iterable[str], rank: int
) -> dict[str, Tensor]:
    """The tensors by our names and in our shapes. `targets`: PEFT's target_parameters."""
    targets = list(targets)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(".lora_")
        module = stem
        while module.endswith(_WRAPPER):
            module = module.removesuffix(_WRAPPER)
        depth = (len(stem) - len(module)) // len(_WRAPPER)
        own = _wrapped(module, targets)
        is_a = part.startswith("A")
        # A target may be the last part of a name, so any module could have it: shapes tell.
        if depth >= len(own) or tensor.shape[0 if is_a else -1] == rank:
            renamed[name] = tensor
        elif is_a:
            renamed[f"{module}.{own[-1 - depth]}{_A}"] = tensor.unflatten(0, (-1, rank))
        else:
            shaped = tensor.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
            renamed[f"{module}.{own[-1 - depth]}{_B}"] = shaped
    return renamed


def _wrapped(module: str, targets: Iterable[str]) -> list[str]:
    """The adapted weights of a module, in the order in which PEFT wraps them."""
    endings = tuple(f".{target}" for target in targets)
    return [weight for weight in EXPERT_WEIGHTS if f".{module}.{weight}".endswith(endings)]
