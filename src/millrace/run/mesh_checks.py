"""Checks of the trainer's mesh and of lora.quantization, against the other settings, the model and
the devices of this host.

Promise: what cannot work is refused in one sentence before any worker starts. Only tensor
parallelism, whose plans are part of the models, imports torch.
"""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING

from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.microbatch import MeshSizes
from millrace.models.directory import num_experts, rope_tables
from millrace.training.losses.loss import Loss, has_trait

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TRIED = {"torch": "2.13", "transformers": "5.22"}  # versions that several ranks were tested with


def check_mesh(config: RunConfig) -> None:
    """Check what needs nothing but the settings."""
    if config.in_nf4:
        _check_quantization(config)
    trainer, devices = config.trainer, config.placement.trainer
    ranks, sizes = trainer.ranks, trainer.mesh_sizes
    if ranks == "auto":  # checked when the GPUs are known
        return
    if sizes.num_ranks != ranks:
        raise ConfigError(
            f"trainer.mesh has dp_replicate {sizes.dp_replicate} * dp_shard {sizes.dp_shard} * cp"
            f" {sizes.cp} * tp {sizes.tp} = {sizes.num_ranks} ranks, but trainer.ranks ="
            f" {ranks}; make them equal."
        )
    if sizes.dp_shard * sizes.cp % sizes.ep:
        raise ConfigError(
            f"trainer.mesh.ep = {sizes.ep} does not divide dp_shard * cp ="
            f" {sizes.dp_shard * sizes.cp}; choose a divisor."
        )
    num_devices = f"{len(devices)} device{'s' * (len(devices) > 1)}"
    num_here, remote = ranks - trainer.remote, trainer.remote
    if len(devices) != num_here and (len(devices) > 1 or any(":" in device for device in devices)):
        joining = f", of which trainer.remote = {remote} choose theirs on other hosts"
        raise ConfigError(
            f"placement.trainer names {num_devices} for trainer.ranks = {ranks}"
            f"{joining if remote else ''}; name one for each rank{' here' if remote else ''}, or"
            " 'auto' alone."
        )
    if "cpu" in devices and any(device != "cpu" for device in devices):
        raise ConfigError(
            "placement.trainer mixes 'cpu' with other devices; put all ranks on GPUs, or all on the"
            " CPU."
        )


def _check_quantization(config: RunConfig) -> None:
    """Refuse what could not compute over the values that the trainer holds in 4 bits."""
    engine, ranks, sharded = config.engine, config.trainer.ranks, config.trainer.mesh.dp_shard
    obstacles = {
        # Nothing shards these matrices. "auto" is checked when the GPUs are known.
        f"trainer.ranks = {ranks}": ranks not in (1, "auto"),
        f"trainer.mesh.dp_shard = {sharded}": sharded != "auto",
        f"engine.type = {engine.type!r}, which loads the base in full precision": (
            engine.type != "embedded"
        ),
        # Small values of bfloat16 are less precise in float16.
        "engine.dtype = 'float16', which rounds the base": engine.dtype == "float16",
        "weights.probe = true, which reads the base in full precision": config.probes_weights,
    }
    if obstacle := next((name for name, is_set in obstacles.items() if is_set), None):
        raise ConfigError(
            f"lora.quantization = 'nf4' does not support {obstacle}; change it, or leave"
            " lora.quantization out."
        )


def check_baseline(config: RunConfig, loss: Loss) -> None:
    """Check that advantages are those that loss.minimum_variance_baseline is defined for."""
    if has_trait(loss, "subtracts_baseline") and (config.policies or config.critic is not None):
        found = "[policies]" if config.policies else "[critic]"
        raise ConfigError(
            f"loss.minimum_variance_baseline does not work with {found}: it compares the sequences"
            " of one policy in a group, without a critic; remove one of the two."
        )


def check_model_mesh(sizes: MeshSizes, model: "PreTrainedConfig", *, path: str) -> None:
    """Check that the ranks can share the heads and the experts of the model."""
    num_heads, shared = getattr(model, "num_attention_heads", 0), sizes.tp * sizes.cp
    key_value_heads = getattr(model, "num_key_value_heads", None) or num_heads
    if shared > 1 and num_heads == 0:  # as in Mamba
        raise ConfigError(
            f"Model {path!r} has no attention heads, which trainer.mesh.tp * cp = {shared} ranks"
            " would share; set tp and cp to 1."
        )
    _check_even(num_heads, "attention heads", shared, "tp * cp", path=path)
    _check_even(key_value_heads, "key-value heads", shared, "tp * cp", path=path)
    kinds = {rope.get("rope_type") for rope in rope_tables(model)} & {"dynamic", "longrope"}
    if sizes.cp > 1 and kinds:
        raise ConfigError(
            f"Model {path!r} has rotary embeddings of type {kinds.pop()!r}, which depend on all"
            f" positions of a pass, and trainer.mesh.cp = {sizes.cp} divides them; set cp to 1."
        )
    # Before transformers 5.22, some architectures had the second name alone.
    layers = [getattr(model, name, None) or [] for name in ("layer_types", "layers_block_type")]
    states = {"conv", "hybrid", "linear_attention", "mamba"}
    if sizes.cp > 1 and not states.isdisjoint(chain(*layers)):
        raise ConfigError(
            f"Model {path!r} has layers with a recurrent state, which computes a sequence token by"
            f" token, and trainer.mesh.cp = {sizes.cp} divides sequences; set cp to 1."
        )
    number = num_experts(model)
    if sizes.ep > 1 and number == 0:
        raise ConfigError(
            f"trainer.mesh.ep = {sizes.ep} shares experts, and model {path!r} has none; set ep to"
            " 1."
        )
    _check_even(number, "experts", sizes.ep, "ep", path=path)
    if sizes.tp * sizes.ep > 1:
        _check_plans(sizes, model, path=path)


def _check_even(number: int, what: str, num_ranks: int, dimension: str, *, path: str) -> None:
    if number % num_ranks:
        raise ConfigError(
            f"Model {path!r} has {number} {what}, which trainer.mesh.{dimension} = {num_ranks}"
            f" ranks cannot share evenly; choose a divisor of {number}."
        )


def _check_plans(sizes: MeshSizes, model: "PreTrainedConfig", *, path: str) -> None:
    """Check that transformers can divide layers over tp, and experts over ep."""
    check_has_plans()
    of_experts = (model.base_model_ep_plan or {}).values()
    is_known = {
        "tensor": sizes.tp == 1 or bool(model.base_model_tp_plan),
        "expert": num_experts(model) == 0 or "ep_dispatch_experts" in of_experts,
    }
    for kind, has_plan in is_known.items():
        if not has_plan:
            raise ConfigError(
                f"transformers has no plan of {kind} parallelism for {model.model_type!r}, the"
                f" architecture of model {path!r}; set trainer.mesh.tp and ep to 1."
            )
    if sizes.tp > 1:
        from millrace.models.parallel_plans import check_division  # only here: it imports torch

        check_division(model, tp=sizes.tp)


def check_has_plans(*, module: str = "transformers.distributed.expert_parallel") -> None:
    """Check that the installed transformers has the code of tensor and expert parallelism."""
    if find_spec(module) is None:
        raise ConfigError(
            f"trainer.mesh.tp and ep need transformers {TRIED['transformers']}, and"
            f" {version('transformers')} is installed; upgrade it, or set both to 1."
        )


def rank_warnings(config: RunConfig, *, tried: Mapping[str, str] = TRIED) -> list[str]:
    """A warning if several ranks were never tested with the installed versions."""
    found = {name: version(name) for name in tried}
    if not config.trainer.is_sharded or all(
        found[name].startswith(f"{tried[name]}.") for name in tried
    ):
        return []
    return [
        f"trainer.ranks = {config.trainer.num_ranks} was tested with"
        f" {' and '.join(f'{name} {number}' for name, number in tried.items())}, and here are"
        f" {' and '.join(f'{name} {number}' for name, number in found.items())}; compare the first"
        " steps with those of one rank."
    ]
