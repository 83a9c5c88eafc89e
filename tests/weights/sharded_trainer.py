"""The ranks of a trainer with sharded weights, for test_gathering.py.

Arguments: folder, and for each rank the path of a FIFO. Each line that all ranks read from their
FIFOs is a command with its arguments. Rank 0 prints each update as a line of JSON and
continues when it reads a line. The first line of the output is the pids of the ranks, the last
their exit codes.
"""

import functools
import itertools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import NoSpace, PackingSender
from millrace.weights.gathering import GatheringSender
from millrace.weights.publisher import Publisher
from millrace.weights.transport import make_sender
from millrace.weights.transports.memory import ShmSendBackend

BUCKET_BYTES = 4096
NUM_RACED = 60
TRANSPORTS = ("shm", "disk", "collective")
VERSIONS = (1, 2, 3)

folder = Path()
commands: TextIO  # of this rank


def full_weights(version: int) -> dict[str, torch.Tensor]:
    """The unsharded weights of a version, equal in every process. An even version differs from the
    one before it in few values, an odd one in nearly all."""
    draw = torch.Generator().manual_seed((version + 1) // 2)
    weights = {
        "rows": torch.randn(7, 5, generator=draw),  # 4 rows and 3
        "columns": torch.randn(6, 9, generator=draw),
        "both": torch.randn(5, 3, generator=draw),
        "large": torch.randn(101, 33, generator=draw),  # several buckets
        "wide": torch.randn(3, 5001, generator=draw),  # a row is several buckets
        "twice": torch.randn(12, 4, generator=draw),
        "lonely": torch.randn(1, 8, generator=draw),  # on rank 0 alone
        "everywhere": torch.randn(11, generator=draw),
        "plain": torch.randn(4, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "empty": torch.empty(0, 3),
        "counts": torch.randint(0, 2**40, (13,), generator=draw),
        "flags": torch.rand(9, generator=draw) > 0.5,
    }
    torch.manual_seed((version + 1) // 2)
    weights |= {f"fsdp.{n}": p.detach() for n, p in small_model().named_parameters()}
    if version % 2 == 0:
        for name in ("columns", "large", "counts", "fsdp.0.weight"):
            weights[name].flatten()[::29] += 1
    return weights


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(9, 15), torch.nn.LayerNorm(15))


@functools.cache
def make_mesh(text: str) -> DeviceMesh:
    """For example "dp_shard=2" or "dp_replicate=2,dp_shard=2"."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharded_weights(version: int, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    dims = mesh.mesh_dim_names or ()
    whole = [Replicate() for _ in dims]
    sharded = [Shard(0) if name == "dp_shard" else Replicate() for name in dims]
    placements: dict[str, list[Any]] = {
        "columns": [*whole[1:], Shard(1)],
        "both": [Shard(0), Shard(1)][-len(dims) :],
        "everywhere": whole,
        "scalar": whole,
    }
    model = small_model()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(version).items():
        if name.startswith("fsdp."):
            model.get_parameter(name.removeprefix("fsdp.")).data.copy_(tensor)
        elif name == "plain":
            found[name] = tensor
        elif name == "twice" and "tp" in dims:
            found[name] = sharded_twice(tensor, mesh)
        else:
            found[name] = distribute_tensor(tensor, mesh, placements.get(name, sharded))
    fully_shard(model, mesh=mesh["dp_shard"] if "tp" in dims else mesh)
    return found | {f"fsdp.{name}": p.detach() for name, p in model.named_parameters()}


def sharded_twice(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Rows over tp, and those of each tp rank over dp_shard."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp_shard"])
    return module.weight.detach()


def overwrite(weights: dict[str, torch.Tensor]) -> None:
    """As the next step would."""
    for tensor in weights.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


class LiveBytes(TorchDispatchMode):
    """How much of what torch allocates within it is alive at a time, at most; and what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            self.sent += sum(t.nbytes for t in tree_leaves(args) if _is_plain(t))
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


def gathering(transport: str, **arguments: Any) -> GatheringSender:
    return gathering_of(
        lambda: make_sender(
            transport, dtype=torch.bfloat16, directory=folder / "weights", **arguments
        )
    )


def gathering_of(make: Any) -> GatheringSender:
    return GatheringSender(make, bucket_bytes=BUCKET_BYTES, timeout_s=20.0)


def print_from_rank_0(value: object) -> None:
    if dist.get_rank() == 0:
        print(msgspec.json.encode(value).decode(), flush=True)


def print_of_all_ranks(value: object) -> None:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    print_from_rank_0(values)


def wait_for_line() -> None:
    if dist.get_rank() == 0:
        commands.readline()
    dist.barrier()


def publish_by_all_transports(mesh: str, payload: str) -> None:
    for transport in TRANSPORTS:
        publisher = Publisher(gathering(transport, payload=payload), emit=print_from_rank_0)
        for version in VERSIONS:
            weights = sharded_weights(version, make_mesh(mesh))
            publisher.publish(version, weights)
            overwrite(weights)
            wait_for_line()
        publisher.close()


def publish_after_a_failure() -> None:
    """The second version is gathered, but there is no space for it at first."""
    num_failures = 1

    class FullBackend(ShmSendBackend):
        def offer(self, update: WeightUpdate, **arguments: Any) -> WeightUpdate:
            nonlocal num_failures
            if update.version == 2 and num_failures:
                num_failures -= 1
                raise NoSpace("There is no space.")
            return super().offer(update, **arguments)

    def make() -> PackingSender:
        return PackingSender(FullBackend(), dtype=torch.bfloat16, payload="delta")

    sender, mesh = gathering_of(make), make_mesh("dp_shard=2")
    sender.publish(1, sharded_weights(1, mesh))
    try:
        sender.publish(2, sharded_weights(3, mesh))  # other values than the next try
    except NoSpace as error:
        print_of_all_ranks(str(error))
    print_from_rank_0(sender.publish(2, sharded_weights(2, mesh)))
    wait_for_line()
    sender.close()


def measure_what_is_gathered(mesh: str, payload: str) -> None:
    """Prints for each rank the peak of its memory, what it keeps and what it sends."""
    sender = gathering("shm", payload=payload)
    sender.publish(1, sharded_weights(1, make_mesh(mesh)))  # makes the transport's own memory
    sender.release(1)
    weights = sharded_weights(2, make_mesh(mesh))
    with LiveBytes() as live:
        update = sender.publish(2, weights)
    assert update.num_bytes > 8 * BUCKET_BYTES
    print_of_all_ranks((live.peak, live.now, live.sent))
    sender.close()


def race() -> None:
    """Each rank publishes at its own pace; every value of version N is N."""
    publisher = Publisher(gathering("shm"), emit=print_from_rank_0)
    weight = distribute_tensor(torch.zeros(101, 33), make_mesh("dp_shard=2"), [Shard(0)])
    draw = torch.Generator().manual_seed(dist.get_rank())
    for version in range(1, NUM_RACED + 1):
        weight.to_local().fill_(version)
        publisher.publish(version, {"weight": weight})
        time.sleep(0.01 * float(torch.rand((), generator=draw)))
    if dist.get_rank() == 0:
        while line := commands.readline():
            publisher.release(int(line))
            if int(line) == NUM_RACED:
                break
    dist.barrier()
    publisher.close()


def step_while_a_gather_is_held_up() -> None:
    """Rank 0 has no memory for the version until the step is done."""
    may_allocate = threading.Event()

    class HeldBackend(ShmSendBackend):
        def allocate(self, *arguments: Any, **more: Any) -> Any:
            assert may_allocate.wait(60)
            return super().allocate(*arguments, **more)

    sender = gathering_of(lambda: PackingSender(HeldBackend(), dtype=torch.float32))
    publisher = Publisher(sender, emit=print_from_rank_0)
    torch.manual_seed(0)
    model = small_model()
    fully_shard(model, mesh=make_mesh("dp_shard=2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(torch.full((3, 9), 1.0 + dist.get_rank())) - 1).square().sum()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    publisher.publish(1, dict(model.named_parameters()))
    losses = [step()]
    print_from_rank_0("stepped")
    may_allocate.set()
    losses += [step() for _ in range(20)]
    assert losses[-1] < losses[0]
    wait_for_line()
    publisher.close()


def publish_for_ever() -> None:
    """Gather versions without a pause until a rank is lost."""
    sender = gathering("disk")
    weight = distribute_tensor(torch.zeros(2000, 1000), make_mesh("dp_shard=2"), [Shard(0)])
    try:
        for version in itertools.count(1):
            weight.to_local().fill_(version)
            print_from_rank_0(sender.publish(version, {"weight": weight}))
            if version > 1:
                sender.release(version - 1)
    except WeightError as error:
        print_from_rank_0(str(error))
        commands.readline()


def run_rank(rank: int, num_ranks: int, pipe: str) -> None:
    global commands
    torch.set_num_threads(1)
    commands = Path(pipe).open()  # noqa: SIM115 - until this process ends
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    while words := commands.readline().split():
        globals()[words[0]](*words[1:])


def main() -> None:
    """Fork the ranks, so that torch is imported once."""
    global folder
    folder = Path(sys.argv[1])
    pipes, pids = sys.argv[2:], []
    for rank, pipe in enumerate(pipes):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            run_rank(rank, len(pipes), pipe)
        except BaseException:  # noqa: BLE001 - reported by its exit code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main()
