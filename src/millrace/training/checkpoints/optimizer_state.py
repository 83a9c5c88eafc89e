"""The state of an optimizer by the names of its parameters, so that it fits any number of ranks.

torch numbers parameters in the order of their groups, and the groups depend on how a model is
sharded. States of format 1 have these numbers; they were written by one rank, which had all
matrices in its first group and all vectors in its second.

In the state of several ranks, tensors without values (on the device "meta") stand for sharded ones.
The values of these are in files, named after the parameter and the kind of state. Moments that an
8-bit optimizer keeps in blocks of numbers are float32 there: other ranks have other blocks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.config.training import ADAMW_8BIT
from millrace.models.sharding import empty_like, local_part, shard_like
from millrace.training.checkpoints.shards import ShardReader
from millrace.training.offload import OffloadedOptimizer


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    state = optimizer.state_dict()
    names = _names(optimizer, module)
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def sharded_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The sharded tensors of named_state() by their names in files."""
    return {
        f"{name}.{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    }


def load_named_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Any], *, shards: Path
) -> None:
    """Other tensors of `state` are whole; the files with sharded ones are in `shards`. Raises
    KeyError, RuntimeError or ValueError if the state is another model's."""
    names = _names(optimizer, module)
    groups = state["param_groups"]
    if any(isinstance(key, int) for group in groups for key in group["params"]):
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        old_order = [n for n, p in trained if p.ndim >= 2] + [n for n, p in trained if p.ndim < 2]
        saved = {old_order[number]: values for number, values in state["state"].items()}
        groups = [{**g, "params": [old_order[n] for n in g["params"]]} for g in groups]
    else:
        saved = state["state"]
    group_of = {name: group for group in groups for name in group["params"]}
    parameters = dict(module.named_parameters())
    is_8bit = optimizer.param_groups[0].get("type") == ADAMW_8BIT
    # The device may have no room for state that is offloaded, or for float32 moments.
    is_offloaded = isinstance(optimizer, OffloadedOptimizer)
    device = torch.device("cpu") if is_offloaded or is_8bit else None
    own: dict[int, dict[str, Any]] = {}
    to_read: dict[str, Tensor] = {}
    for number, name in names.items():
        if name in saved:
            own[number] = _sharded(saved[name], parameters[name], device)
            for key, value in saved[name].items():
                if isinstance(value, Tensor) and value.is_meta:
                    to_read[f"{name}.{key}"] = own[number][key]
    if to_read:
        ShardReader(shards).read(to_read)
    if is_8bit:
        inner: Any = optimizer.inner if is_offloaded else optimizer
        for number, values in own.items():
            for key, moment in _quantized(values, parameters[names[number]], inner).items():
                values[key] = moment.to("cpu") if is_offloaded else moment
    optimizer.load_state_dict(
        {
            "state": own,
            "param_groups": [
                {**group_of[names[group["params"][0]]], "params": group["params"]}
                for group in optimizer.state_dict()["param_groups"]
            ],
        }
    )


@torch.no_grad()
def _quantized(values: Mapping[str, Any], parameter: Tensor, optimizer: Any) -> dict[str, Tensor]:
    """The moments of a parameter as torchao keeps them, on the device of the parameter."""
    moments: dict[str, Tensor] = {}
    for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if key in values:  # else the state is another optimizer's, which is refused
            moments[key] = optimizer._new_buffer(parameter, is_signed)
            local_part(moments[key]).copy_(local_part(values[key]).to(parameter.device))
    return moments


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[int, str]:
    """The names of parameters by torch's numbers."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: names[parameter] for number, parameter in enumerate(parameters)}


def _sharded(
    values: Mapping[str, Any], parameter: Tensor, device: torch.device | None
) -> dict[str, Any]:
    """This rank's part of the state of a parameter, without the values that are in files."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            is_in_file = isinstance(value, Tensor) and value.is_meta
            return torch.empty_like(value, device="cpu") if is_in_file else value
        if value.is_meta:
            return empty_like(parameter, dtype=value.dtype, device=device)
        if is_traceable_wrapper_subclass(value) and isinstance(parameter, DTensor):
            value = value.dequantize()  # pyright: ignore
        return shard_like(value, parameter, device=device)

    return {key: own(value) for key, value in values.items()}
