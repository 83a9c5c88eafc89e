"""The state of an optimizer by the names of its parameters, so that it fits any number of ranks.

torch numbers parameters in the order of their groups, and the groups depend on how a model is
sharded. States of format 1 have these numbers; they were written by one rank, which had all
matrices in its first group and all vectors in its second.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from millrace.models.sharding import shard_like
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


def load_named_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Any]
) -> None:
    """Tensors of `state` are whole; raises KeyError if it is another model's."""
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
    # The device may have no room for state that is offloaded.
    device = torch.device("cpu") if isinstance(optimizer, OffloadedOptimizer) else None
    optimizer.load_state_dict(
        {
            "state": {
                number: _sharded(saved[name], parameters[name], device)
                for number, name in names.items()
                if name in saved
            },
            "param_groups": [
                {**group_of[names[group["params"][0]]], "params": group["params"]}
                for group in optimizer.state_dict()["param_groups"]
            ],
        }
    )


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[int, str]:
    """The names of parameters by torch's numbers."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: names[parameter] for number, parameter in enumerate(parameters)}


def _sharded(
    values: Mapping[str, Any], parameter: Tensor, device: torch.device | None
) -> dict[str, Any]:
    return {
        name: shard_like(value, parameter, device=device)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for name, value in values.items()
    }
