"""One rank of a trainer with sharded weights, for test_gathering.py.

Arguments: rank, folder. Each line that all ranks read is a command. Rank 0 prints each update as a
line of JSON and continues when it reads a line.
"""

import itertools
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.gathering import GatheringSender
from millrace.weights.publisher import Publisher
from millrace.weights.transport import make_sender

NUM_RANKS = 2
BUCKET_BYTES = 4096
NUM_RACED = 60


def full_weights(version: int) -> dict[str, torch.Tensor]:
    """The unsharded weights of a version, equal in every process."""
    draw = torch.Generator().manual_seed(version)
    weights = {
        "rows": torch.randn(7, 5, generator=draw),  # 4 rows and 3
        "columns": torch.randn(6, 9, generator=draw),
        "both": torch.randn(5, 3, generator=draw),
        "large": torch.randn(101, 33, generator=draw),  # several buckets
        "wide": torch.randn(3, 5001, generator=draw),  # a row is several buckets
        "lonely": torch.randn(1, 8, generator=draw),  # nothing of it on rank 1
        "everywhere": torch.randn(11, generator=draw),
        "plain": torch.randn(4, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "empty": torch.empty(0, 3),
        "counts": torch.randint(0, 2**40, (13,), generator=draw),
        "flags": torch.rand(9, generator=draw) > 0.5,
    }
    torch.manual_seed(version)
    return weights | {f"fsdp.{n}": p.detach() for n, p in small_model().named_parameters()}


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(9, 15), torch.nn.LayerNorm(15))


def sharded_weights(version: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    grid = init_device_mesh("cpu", (NUM_RANKS, 1))
    full = full_weights(version)
    placements: dict[str, Any] = {
        "columns": (mesh, [Shard(1)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "everywhere": (mesh, [Replicate()]),
        "scalar": (mesh, [Replicate()]),
    }
    found: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        if not name.startswith("fsdp."):
            where, how = placements.get(name, (mesh, [Shard(0)]))
            found[name] = tensor if name == "plain" else distribute_tensor(tensor, where, how)
    torch.manual_seed(version)
    model = small_model()
    fully_shard(model, mesh=mesh)
    return found | {f"fsdp.{name}": p.detach() for name, p in model.named_parameters()}


def overwrite(weights: dict[str, torch.Tensor]) -> None:
    """As the next step would."""
    for tensor in weights.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


class LiveBytes(TorchDispatchMode):
    """How much of what torch allocates within it is alive at a time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if _is_plain(t)}
        for tensor in tree_leaves(result):
            if _is_plain(tensor) and _memory(tensor) not in given:
                storage = tensor.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def gathering(transport: str, folder: Path, **arguments: Any) -> GatheringSender:
    return GatheringSender(
        lambda: make_sender(
            transport, dtype=torch.bfloat16, directory=folder / "weights", **arguments
        ),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=20.0,
    )


def print_update(update: WeightUpdate) -> None:
    if dist.get_rank() == 0:
        print(msgspec.json.encode(update).decode(), flush=True)


def publish_by_all_transports(folder: Path) -> None:
    for version, transport in enumerate(("shm", "disk", "collective"), start=1):
        publisher = Publisher(gathering(transport, folder), emit=print_update)
        weights = sharded_weights(version)
        publisher.publish(version, weights)
        overwrite(weights)
        if dist.get_rank() == 0:
            sys.stdin.readline()
        dist.barrier()
        publisher.close()


def measure_what_is_gathered(folder: Path) -> None:
    sender, weights = gathering("shm", folder), sharded_weights(1)
    sender.publish(1, weights)  # makes the transport's own memory
    sender.release(1)
    with LiveBytes() as live:
        update = sender.publish(2, weights)
    assert update.num_bytes > 8 * BUCKET_BYTES
    peaks: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(peaks, live.peak)
    if dist.get_rank() == 0:
        print(peaks, flush=True)
    sender.close()


def race(folder: Path) -> None:
    """Each rank publishes at its own pace; every value of version N is N."""
    publisher = Publisher(gathering("shm", folder), emit=print_update)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    weight = distribute_tensor(torch.zeros(101, 33), mesh, [Shard(0)])
    draw = torch.Generator().manual_seed(dist.get_rank())
    for version in range(1, NUM_RACED + 1):
        weight.to_local().fill_(version)
        publisher.publish(version, {"weight": weight})
        time.sleep(0.01 * float(torch.rand((), generator=draw)))
    if dist.get_rank() == 0:
        while line := sys.stdin.readline():
            publisher.release(int(line))
            if int(line) == NUM_RACED:
                break
    dist.barrier()
    publisher.close()


def publish_for_ever(folder: Path) -> None:
    """Gather versions without a pause until a rank is lost."""
    sender = gathering("disk", folder)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    weight = distribute_tensor(torch.zeros(2000, 1000), mesh, [Shard(0)])
    try:
        for version in itertools.count(1):
            weight.to_local().fill_(version)
            print_update(sender.publish(version, {"weight": weight}))
            if version > 1:
                sender.release(version - 1)
    except WeightError as error:
        print(msgspec.json.encode(str(error)).decode(), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    while deed := sys.stdin.readline().strip():
        globals()[deed](folder)
