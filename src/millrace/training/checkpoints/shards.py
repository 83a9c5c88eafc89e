"""Tensors that ranks write and read in parts, with torch.distributed.checkpoint (DCP).

Each rank writes the parts that it has into safetensors files of its own, whose headers say where
the parts belong. A reader looks at the headers of all files and then reads the slices that it
needs, whatever number of ranks wrote them. A safetensors file without such a header holds whole
tensors.

DCP's planners and its safetensors storage do the work. Its save() and load() are not used: ranks
would send each other pickled plans, and its default storage has a pickled index. Nothing has to be
agreed on here: of equal parts, the first rank writes its own, and the manifest of the checkpoint
lists the files that belong to it.

The state of an optimizer has the names of its parameters: torch's numbers depend on how a model is
sharded. States of format 1 have numbers; one rank wrote them, with all matrices in its first group
and all vectors in its second. In the state of several ranks, tensors without values (on the device
"meta") stand for sharded ones, whose values are in files, named after the parameter and the kind of
state. Moments that an 8-bit optimizer keeps in blocks of numbers are float32 there: other ranks
have other blocks.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.config.training import ADAMW_8BIT
from millrace.core.errors import CheckpointError
from millrace.models.sharding import empty_like, is_first_owner, local_part, shard_like, with_part
from millrace.training.offload import OffloadedOptimizer

# Approximate size of a file, which is in memory while it is written. A larger tensor has its own.
_FILE_BYTES = 2 * 2**30


def own_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies of the parts that this rank has to write. Nothing is sent."""
    return {
        name: _host_copy(tensor.detach())
        for name, tensor in tensors.items()
        if is_first_owner(tensor) and local_part(tensor).numel()
    }


def _host_copy(tensor: Tensor) -> Tensor:
    part = local_part(tensor).to("cpu", copy=True)
    if is_traceable_wrapper_subclass(part):  # quantized, in blocks of this rank
        part = part.dequantize()
    part = part.contiguous()
    return with_part(part, tensor) if isinstance(tensor, DTensor) else part


def write_parts(folder: Path, parts: Mapping[str, Tensor], *, rank: int) -> None:
    """Write own_parts() of a rank; ranks may do so at the same time."""
    if not parts:
        return
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(parts), is_coordinator=True)
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(parts), save_distributed=True
    )
    writer.per_thread_copy_ahead = 0  # parts are on the host; copies ahead would use cuda:0
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]  # files are named after the rank
    writer.write_data(plan, planner).wait()


def _file_numbers(parts: Mapping[str, Tensor]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    number, room = 0, 0
    for name, tensor in parts.items():
        num_bytes = local_part(tensor).nbytes
        if num_bytes > room:
            number, room = number + 1, _FILE_BYTES
        numbers[name] = number
        room -= num_bytes
    return numbers


class ShardReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, of which this rank may have a part, with the values of these names."""
        saved: dict[str, Any] = self._metadata.state_dict_metadata
        for name, tensor in tensors.items():
            if name not in saved or saved[name].size != tensor.shape:
                found = f"of shape {list(saved[name].size)}" if name in saved else "absent"
                raise CheckpointError(
                    f"{str(self._folder)!r} was saved from another model, whose {name} is {found},"
                    f" and here it is of shape {list(tensor.shape)}; resume with the model.path and"
                    " critic.path that the run began with."
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()

    def whole_tensors(self) -> Iterator[dict[str, Tensor]]:
        """All tensors on the host, about _FILE_BYTES at a time. Those of a layer come together."""
        found: dict[str, Any] = self._metadata.state_dict_metadata
        part: dict[str, Tensor] = {}
        for _, names in groupby(sorted(found, key=_layer_of), key=_layer_of):
            kinds = {name: found[name] for name in names}
            layer = {n: torch.empty(k.size, dtype=k.properties.dtype) for n, k in kinds.items()}
            if part and _size(part) + _size(layer) > _FILE_BYTES:
                self.read(part)
                yield part
                part = {}
            part |= layer
        self.read(part)
        yield part


def _layer_of(name: str) -> str:
    """The prefix of a weight that it shares with its layer; the weight's name outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


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
    CheckpointError, KeyError, RuntimeError or ValueError if the state is another model's."""
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
