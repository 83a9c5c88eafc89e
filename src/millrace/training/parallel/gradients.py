"""Gradients of a model whose weights may be sharded: their sum over ranks and their norm."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from millrace.models.sharding import local_part


def sum_replicated(gradients: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Sum the gradients of weights that are not sharded, such as an adapter's, over the mesh; FSDP
    has summed the others."""
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    if not plain:
        return
    flat = torch.cat([gradient.flatten() for gradient in plain])
    dist.all_reduce(flat, group=mesh.get_group())
    for gradient, total in zip(plain, flat.split([g.numel() for g in plain]), strict=True):
        gradient.copy_(total.view_as(gradient))


def squared_norm(gradients: Sequence[Tensor], *, num_ranks: int) -> Tensor:
    """This rank's share of the squared norm, [] float64: a part that several ranks have is divided
    among them, so the sum over all ranks is the whole."""
    norms = [torch.linalg.vector_norm(local_part(g), dtype=torch.float64) for g in gradients]
    squares = torch.stack(norms).square()
    copies = [num_ranks / _num_parts(gradient) for gradient in gradients]
    return (squares / squares.new_tensor(copies)).sum()


def _num_parts(tensor: Tensor) -> int:
    parts = 1
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            parts *= size if placement.is_shard() else 1
    return parts


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    for gradient in gradients:
        local_part(gradient).mul_(factor)
