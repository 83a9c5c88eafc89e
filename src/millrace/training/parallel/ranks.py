"""The ranks of one trainer, as one of them sees them.

Promise: a decision is the same on all ranks. All ranks make the same calls in the same order. With
one rank nothing is sent, and torch.distributed is not used.

Losses divide by the totals of the whole batch, so what ranks have computed is summed, never
averaged. Used by the trainer's main thread.
"""

import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from millrace.core.errors import RunFailed
from millrace.core.mesh import MeshSizes

NAMES = ("dp_replicate", "dp_shard", "cp", "tp")  # dimensions of the mesh, the slowest first


class Ranks:
    def __init__(self, sizes: MeshSizes | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """`mesh` has the dimensions NAMES; None = one rank."""
        self.sizes = sizes or MeshSizes()
        self._mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()

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
        """Wait for the other ranks at `rendezvous`, "tcp://HOST:PORT", where rank 0 listens. The
        default backend is NCCL on GPUs and gloo on CPUs."""
        if sizes.num_ranks == 1:
            return cls(sizes)
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        try:
            dist.init_process_group(
                backend,
                init_method=rendezvous,
                rank=rank,
                world_size=sizes.num_ranks,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RunFailed(
                f"Rank {rank} of the trainer could not reach the {sizes.num_ranks - 1} others at"
                f" {rendezvous} within {timeout_s:g} s ({reason})."
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

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The sum over ranks with different microbatches; changes `tensor` in place."""
        if self.sizes.num_data_ranks > 1:
            dist.all_reduce(tensor, group=self._data_mesh.get_group())
        return tensor

    def max_over_data(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over ranks with different microbatches; changes it in place."""
        if self.sizes.num_data_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._data_mesh.get_group())
        return tensor

    def most(self, number: int, device: torch.device) -> int:
        """The largest number of all ranks."""
        if self._mesh is None:
            return number
        largest = torch.tensor(number, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    @functools.cached_property
    def _data_mesh(self) -> DeviceMesh:
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp")
