"""Tensors that ranks write and read in parts, with torch.distributed.checkpoint (DCP).

Each rank writes the parts that it has into safetensors files of its own, whose headers say where
the parts belong. A reader looks at the headers of all files and then reads the slices that it
needs, whatever number of ranks wrote them. A safetensors file without such a header holds whole
tensors.

DCP's planners and its safetensors storage do the work. Its save() and load() are not used: ranks
would send each other pickled plans, and its default storage has a pickled index. Nothing has to be
agreed on here: of equal parts, the first rank writes its own, and the manifest of the checkpoint
lists the files that belong to it.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from millrace.models.sharding import is_first_owner, local_part, with_part

# Of a file, about; a larger tensor has a file of its own. A file is in memory while it is written.
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
    """Reads what ranks have written into a folder."""

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, of which this rank may have a part, with the values of these names. Raises
        RuntimeError or ValueError if the files hold another model's."""
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
