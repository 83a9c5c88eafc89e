"""Gradients of a model whose weights may be sharded: their sum over ranks and their norm."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from millrace.models.sharding import local_part
from millrace.training.parallel.ranks import Ranks


def sum_unsharded(gradients: Iterable[Tensor], ranks: Ranks) -> None:
    """Sum the gradients of weights that FSDP does not shard, such as an adapter's, over the ranks
    that have different ones; FSDP has summed the others."""
    plain, of_experts = [], []
    for gradient in gradients:
        names = gradient.device_mesh.mesh_dim_names if isinstance(gradient, DTensor) else ("tp",)
        if names in (("tp",), ("ep",)):
            (plain if names == ("tp",) else of_experts).append(local_part(gradient))
    _sum(plain, lambda: ranks.gradient_mesh)
    _sum(of_experts, lambda: ranks.expert_gradient_mesh)


def _sum(gradients: Sequence[Tensor], mesh: Callable[[], DeviceMesh]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=mesh().get_group())
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


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
    parts = 1
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            parts *= 1 if placement.is_replicate() else size
    return parts


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage] - no public name
            [local_part(gradient) for gradient in gradients], factor
        )
