"""Checks of the trainer's mesh, against the settings, the model and the devices of this host.

Promise: a mesh that cannot work is refused in one sentence before any worker starts. Torch-free.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from millrace.config import RunConfig
from millrace.config.training import ADAMW, ADAMW_8BIT
from millrace.core.errors import ConfigError
from millrace.core.mesh import MeshSizes
from millrace.models.directory import num_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNSUPPORTED = ("tp", "ep")  # dimensions of the mesh that must be 1 for now
TRIED = {"torch": "2.13", "transformers": "5.22"}  # versions that several ranks were tested with


def check_mesh(config: RunConfig) -> None:
    """Check what needs nothing but the settings."""
    ranks, sizes, devices = (
        config.trainer.ranks,
        config.trainer.mesh_sizes,
        config.placement.trainer,
    )
    if sizes.num_ranks != ranks:
        raise ConfigError(
            f"trainer.mesh has {_product(sizes)} = {sizes.num_ranks} ranks, but trainer.ranks ="
            f" {ranks}; make them equal."
        )
    if sizes.dp_shard * sizes.cp % sizes.ep:
        raise ConfigError(
            f"trainer.mesh.ep = {sizes.ep} does not divide dp_shard * cp ="
            f" {sizes.dp_shard * sizes.cp}; choose a divisor."
        )
    for name in UNSUPPORTED:
        if (size := getattr(sizes, name)) > 1:
            raise ConfigError(f"trainer.mesh.{name} = {size} is not supported yet; set it to 1.")
    if ranks > 1 and config.optimizer.type == ADAMW_8BIT:
        raise ConfigError(
            f"optimizer.type = {ADAMW_8BIT!r} is not supported with trainer.ranks = {ranks} yet;"
            f" use {ADAMW!r}, with optimizer.offload = true if memory is short."
        )
    if len(devices) != ranks and (len(devices) > 1 or any(":" in device for device in devices)):
        raise ConfigError(
            f"placement.trainer names {_count(len(devices), 'device')} for trainer.ranks = {ranks};"
            " name one for each rank, or 'auto' alone."
        )
    if "cpu" in devices and any(device != "cpu" for device in devices):
        raise ConfigError(
            "placement.trainer mixes 'cpu' with other devices; put all ranks on GPUs, or all on the"
            " CPU."
        )


def check_model_mesh(sizes: MeshSizes, model: "PreTrainedConfig", *, path: str) -> None:
    """Check that the ranks can share the heads and the experts of the model."""
    num_heads = model.num_attention_heads
    heads = {
        "attention heads": num_heads,
        "key-value heads": getattr(model, "num_key_value_heads", None) or num_heads,
    }
    for name, number in heads.items():
        if number % (sizes.tp * sizes.cp):
            raise ConfigError(
                f"Model {path!r} has {number} {name}, which trainer.mesh.tp * cp ="
                f" {sizes.tp * sizes.cp} ranks cannot share evenly; choose a divisor of {number}."
            )
    if sizes.cp > 1 and (kinds := _rope_types(model) & {"dynamic", "longrope"}):
        raise ConfigError(
            f"Model {path!r} has rotary embeddings of type {kinds.pop()!r}, which depend on all"
            f" positions of a pass, and trainer.mesh.cp = {sizes.cp} divides them; set cp to 1."
        )
    if sizes.ep == 1:
        return
    if (number := num_experts(model)) == 0:
        raise ConfigError(
            f"trainer.mesh.ep = {sizes.ep} shares experts, and model {path!r} has none; set ep to"
            " 1."
        )
    if number % sizes.ep:
        raise ConfigError(
            f"Model {path!r} has {number} experts, which trainer.mesh.ep = {sizes.ep} ranks cannot"
            f" share evenly; choose a divisor of {number}."
        )


def check_gpus(config: RunConfig, *, num_gpus: int) -> None:
    """Check that ranks that share no GPU on purpose have one each."""
    ranks, devices = config.trainer.ranks, config.placement.trainer
    if 0 < num_gpus < ranks and ("auto" in devices or "cuda" in devices):
        raise ConfigError(
            f"trainer.ranks = {ranks} need a GPU each, and PyTorch sees {num_gpus}; lower"
            " trainer.ranks, or list the GPU of each rank in placement.trainer to share some."
        )


def rank_warnings(config: RunConfig, *, tried: Mapping[str, str] = TRIED) -> list[str]:
    """A warning if several ranks were never tested with the installed versions."""
    found = {name: version(name) for name in tried}
    if config.trainer.ranks == 1 or all(
        found[name].startswith(f"{tried[name]}.") for name in tried
    ):
        return []
    return [
        f"trainer.ranks = {config.trainer.ranks} was tested with"
        f" {' and '.join(f'{name} {number}' for name, number in tried.items())}, and here are"
        f" {' and '.join(f'{name} {number}' for name, number in found.items())}; compare the first"
        " steps with those of one rank."
    ]


def _rope_types(model: "PreTrainedConfig") -> set[str]:
    """Of the whole model, or of each type of its layers."""
    found: Mapping[str, Any] = getattr(model, "rope_parameters", None) or {}
    tables = [found, *(value for value in found.values() if isinstance(value, dict))]
    return {table["rope_type"] for table in tables if "rope_type" in table}


def _product(sizes: MeshSizes) -> str:
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    return " * ".join(f"{name} {getattr(sizes, name)}" for name in names)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
