"""The ranks of one trainer, as one of them sees them.

Promise: a decision is the same on all ranks. All ranks make the same calls in the same order. With
one rank nothing is sent, and torch.distributed is not used.

Losses divide by the totals of the whole batch, so what ranks have computed is summed, never
averaged. All groups of ranks are parts of one mesh with the dimensions NAMES:

- Ranks that differ only in cp or tp have the same share of the batch and compute the same loss.
- Under tp they have the same hidden states, so gradients of weights that tp does not shard are the
  same on all of them.
- Under cp each has its own rows. All compute the loss from the logprobs of all rows, and the
  backward pass gives each rank the gradient of its own rows.
- So gradients are summed over dp_replicate, dp_shard and cp. FSDP, which shards over dp_shard and
  cp, does that for the weights it shards; gradient_mesh is for the others.
- Experts are divided over ep. Ranks of one ep group, and those that differ in tp, send different
  rows to them, so FSDP shards them, and sums their gradients, over all ranks that have the same
  experts.

Used by one thread, the trainer's main thread; see for_thread().
"""

import fcntl
import functools
import itertools
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from millrace.cluster.address import own_address
from millrace.cluster.wire import Decoder, encode
from millrace.core import files as storage
from millrace.core.errors import RunFailed
from millrace.core.microbatch import MeshSizes
from millrace.models.attention.context import ContextGroup
from millrace.models.sharding import ShardingMeshes, local_part

Value = TypeVar("Value")
NAMES = ("dp_replicate", "dp_shard", "cp", "tp")  # dimensions of the mesh, the slowest first
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # environment variables
_SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, see netdevice(7)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone. Gloo has no error class."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


class Ranks:
    def __init__(self, sizes: MeshSizes | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """`mesh` has the dimensions NAMES; None = one rank."""
        self.sizes = sizes or MeshSizes()
        self._mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        # Decisions are taken on the host, so they do not wait for a GPU.
        self._control: Any = None if mesh is None else dist.new_group(backend="gloo")

    @classmethod
    def join(
        cls,
        sizes: MeshSizes,
        *,
        rank: int,
        rendezvous: str,
        device: torch.device,
        backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> "Ranks":
        """Wait for the other ranks at `rendezvous`, "tcp://HOST:PORT", where rank 0 listens; "" is
        one rank without the code of several. The default backend is NCCL on GPUs and gloo on
        CPUs."""
        if not rendezvous:
            return cls(sizes)
        # Gathering one dimension after the other, of which it warns, is what whole() does.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # a mesh would choose one by rank
        try:
            dist.init_process_group(
                backend,
                init_method=rendezvous,
                rank=rank,
                world_size=sizes.num_ranks,
                timeout=timedelta(seconds=timeout_s),
                device_id=torch.device("cuda", device.index or 0) if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RunFailed(
                f"Rank {rank} of the trainer could not reach the others at {rendezvous} within"
                f" {timeout_s:g} s ({reason}); look for their errors in the run's logs, and raise"
                " supervision.hang_timeout_s if they start slowly."
            ) from error
        shape = (sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
        return cls(sizes, mesh=init_device_mesh(device.type, shape, mesh_dim_names=NAMES))

    @property
    def is_alone(self) -> bool:
        return self._mesh is None

    @property
    def mesh(self) -> DeviceMesh:
        assert self._mesh is not None, "one rank has no mesh"
        return self._mesh

    @property
    def data_rank(self) -> int:
        return self.sizes.data_rank(self.rank)

    @property
    def num_per_share(self) -> int:
        """Number of ranks that compute the same microbatches together."""
        return self.sizes.cp * self.sizes.tp

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        if self._mesh is not None:
            dist.all_reduce(total, group=self._control)
        return total.tolist()

    def most(self, number: int) -> int:
        return max(self._gather_all(number, int))

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        """The values of all ranks with different microbatches, in their order. `kind` is their
        type: records, numbers and arrays, as in messages. Nothing is unpickled."""
        return self._gather_all(value, kind)[:: self.num_per_share]

    def together(self, work: Callable[[], None]) -> None:
        """Do some work and wait for the others; if it fails on one rank, all ranks raise."""
        error: Exception | None = None
        try:
            work()
        except Exception as failure:  # noqa: BLE001 - raised below, when all ranks know
            error = failure
        reasons = self._gather_all("" if error is None else storage.reason(error), str)
        for rank, reason in enumerate(reasons):
            if reason:
                raise error or RuntimeError(f"{reason}, on rank {rank}")

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Raise RunFailed on all ranks unless all of them have the same facts, such as versions of
        packages, by name."""
        first, *others = self._gather_all(dict(facts), dict[str, str])
        for rank, found in enumerate(others, start=1):
            for name, value in first.items():
                if found.get(name) != value:
                    raise RunFailed(
                        f"The trainer's rank 0 has {name} {value}, and rank {rank} has"
                        f" {found.get(name)}; give all ranks the same packages and model."
                    )

    def for_thread(self) -> "Ranks":
        """The same ranks for use by another thread; all ranks call this together."""
        return Ranks(self.sizes, mesh=self._mesh)

    def _gather_all(self, value: Value, kind: type[Value]) -> list[Value]:
        if self._mesh is None:
            return [value]
        own = msgspec.msgpack.encode([bytes(frame) for frame in encode(value)])
        sizes = [torch.tensor(0) for _ in range(self.sizes.num_ranks)]
        dist.all_gather(sizes, torch.tensor(len(own)), group=self._control)
        padded = bytearray(own.ljust(int(max(sizes)), b"\0"))
        sent = torch.frombuffer(padded, dtype=torch.uint8)
        found = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(found, sent, group=self._control)
        texts = [data.numpy()[:n].tobytes() for data, n in zip(found, sizes, strict=True)]
        decoder = Decoder(kind)
        return [decoder.decode(msgspec.msgpack.decode(text, type=list[bytes])) for text in texts]

    @functools.cached_property
    def context(self) -> ContextGroup:
        """Ranks that share the rows of each microbatch."""
        return ContextGroup(None if self.sizes.cp == 1 else self.mesh.get_group("cp"))

    @functools.cached_property
    def sharding_meshes(self) -> ShardingMeshes:
        fsdp = self._with_replicas(self.mesh, self.mesh["dp_shard", "cp"]._flatten("fsdp"))
        if self.sizes.tp * self.sizes.ep == 1:
            return ShardingMeshes(fsdp=fsdp)
        experts = self._expert_mesh
        return ShardingMeshes(
            fsdp=fsdp,
            tp=self.mesh["tp"],
            ep=experts["ep"],
            expert_fsdp=self._with_replicas(experts, experts["efsdp"]),
        )

    def _with_replicas(self, mesh: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
        """FSDP joins this with the dimensions of tp or ep, so all are parts of one mesh."""
        if self.sizes.dp_replicate == 1:
            return shards
        return DeviceMesh._concatenate([mesh["dp_replicate"], shards])

    @functools.cached_property
    def gradient_mesh(self) -> DeviceMesh:
        """Ranks that have different gradients of the same weights."""
        return self.mesh["dp_replicate", "dp_shard", "cp"]._flatten("gradients")

    @functools.cached_property
    def _expert_mesh(self) -> DeviceMesh:
        """The dimensions dp_replicate, efsdp and ep; neighbours share experts."""
        sizes = self.sizes
        shape = (sizes.dp_replicate, sizes.dp_shard * sizes.cp * sizes.tp // sizes.ep, sizes.ep)
        names = ("dp_replicate", "efsdp", "ep")
        return init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=names)


def use_interface_to(host: str) -> None:
    """Use the interface on the route to another rank's host, unless the user has chosen one. gloo
    and NCCL choose by the host's name or by kind, often loopback or the bridge of a container."""
    name = _interface_of(own_address(f"tcp://{host}:1"))
    if name is not None:
        for variable in _INTERFACES:
            os.environ.setdefault(variable, name)


def _interface_of(address: str) -> str | None:
    """Returns None if no interface has the address, as with IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def sum_unsharded(gradients: Iterable[Tensor], ranks: Ranks, *, bucket_bytes: int = 2**26) -> None:
    """Sum the gradients of weights that FSDP does not shard, such as the factors of linear layers,
    over the ranks that have different ones; FSDP has summed the others. About `bucket_bytes` are
    copied to be summed together."""

    def is_sharded(gradient: Tensor) -> bool:
        return isinstance(gradient, DTensor) and gradient.device_mesh.mesh_dim_names != ("tp",)

    own = [local_part(gradient) for gradient in gradients if not is_sharded(gradient)]
    ends = itertools.accumulate(gradient.nbytes for gradient in own)
    pairs = zip(own, ends, strict=True)
    for _, bucket in itertools.groupby(pairs, key=lambda pair: pair[1] // bucket_bytes):
        parts = [gradient for gradient, _ in bucket]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=ranks.gradient_mesh.get_group())
        for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(total.view_as(part))


@torch.no_grad()
def clip(gradients: Sequence[Tensor], *, max_norm: float) -> Tensor:
    """Clip the gradients of a single rank without a wait for the device; returns their norm []."""
    parts = [local_part(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage] - no public name
        parts, (max_norm / (norm + 1e-6)).clamp(max=1.0)
    )
    return norm


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor], *, num_ranks: int) -> Tensor:
    """This rank's share of the squared norm, [] float64: a part that several ranks have is divided
    among them, so the sum over all ranks is the whole."""
    parts = [local_part(gradient) for gradient in gradients]
    norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage] - no public name
        parts, 2, dtype=torch.float64
    )
    squares = torch.stack(norms).square()
    copies = [num_ranks / _num_parts(gradient) for gradient in gradients]
    return (squares / squares.new_tensor(copies)).sum()


def _num_parts(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage] - no public name
            [local_part(gradient) for gradient in gradients], factor
        )
