"""Divides a model over the ranks of a trainer: FSDP2, after tensor and expert parallelism.

Promise: no rank ever holds the whole model, and gradients are sums over the ranks, never means:
losses divide by the totals of the whole batch.

A unit of FSDP is a decoder layer, its experts if they have ranks of their own, its router if it has
float32 weights and compute has 16 bits, or all else: embeddings, final norm and head. The head is
used once per chunk of tokens, so a caller does that inside() one forward pass of the root module,
in which these are whole.

With 16-bit compute, the matrices of a layer are gathered in 16 bits and used as they are: autocast
would keep a 16-bit copy of every layer until the backward pass. Embeddings and head, which the root
gathers, stay float32, and so do routers, which compute in float32, and vectors such as the gains of
norms, which are not sharded.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.core.errors import ConfigError

Result = TypeVar("Result")


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def router_modules(model: nn.Module) -> list[nn.Module]:
    """Routers with a matrix of their own, which stand beside their experts. Engines and trainer
    compute their scores in float32: the few scores of a token weigh all of its experts."""
    return [
        child
        for parent in model.modules()
        if isinstance(getattr(parent, "experts", None), nn.Module)
        for name, child in parent.named_children()
        if name != "experts"
        and type(child) is not nn.Linear
        and any(parameter.ndim == 2 for parameter in child.parameters(recurse=False))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingMeshes:
    """The ranks that share a model. The first of two dimensions of an FSDP mesh holds replicas."""

    fsdp: DeviceMesh
    # Meshes of tensor and expert parallelism; all three are None without them.
    tp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None  # ranks with the same experts


def shard(
    model: PreTrainedModel,
    *,
    root: PreTrainedModel,
    meshes: ShardingMeshes,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Shard the weights of `root`, which is the model or a part of it that has all layers. Layers
    are gathered in `dtype`; if that has 16 bits, forward passes of the root run under autocast, and
    the matrices of layers, if they are to be frozen, may be in 16 bits before; all other weights
    become float32."""
    _check_experts(model)
    is_half = dtype is not torch.float32
    layers = decoder_layers(model)
    matrices = {p for layer in layers for p in layer.parameters() if p.ndim > 1 or not is_half}
    for parameter in {*model.parameters()} - matrices:
        parameter.data = parameter.data.float()
    experts = _divide(model, root, meshes)
    vectors = {p for layer in layers for p in layer.parameters() if is_half and p.ndim < 2}
    # Alone, a rank has nothing to gather again in the backward pass. It keeps 16-bit copies of the
    # layers until then, as autocast does; those of its experts may be large.
    keeps = False if meshes.fsdp.size() == 1 else None
    options: dict[nn.Module, dict[str, Any]] = {m: {"mesh": meshes.expert_fsdp} for m in experts}
    # Routers compute in float32, and the gradients of 16-bit weights would be rounded.
    routers = [m for m in router_modules(root) if is_half and _is_float32(m)]
    of_layers = {"mesh": meshes.fsdp, "reshard_after_forward": keeps}
    options |= {m: {**of_layers, "dtype": torch.float32} for m in routers}
    options |= dict.fromkeys(layers, of_layers)
    units: list[FSDPModule] = []
    for module, own in options.items():
        units.append(_make_unit(module, **{"dtype": dtype, "ignored_params": vectors, **own}))
        if expert_lists(module):
            units[-1].set_reduce_scatter_unused_params(True)
    units.append(_make_unit(root, mesh=meshes.fsdp, ignored_params=vectors))
    forward = root.forward

    def forward_or_compute(*args: Any, compute: Any = None, **kwargs: Any) -> Any:
        with torch.autocast(meshes.fsdp.device_type, dtype=dtype) if is_half else nullcontext():
            return forward(*args, **kwargs) if compute is None else compute()

    root.forward = forward_or_compute

    def reshard_unless_backward_does(*_: Any) -> None:
        """If a unit stayed whole, the next pass would miss an update."""
        if not torch.is_grad_enabled():
            for unit in units:
                unit.reshard()

    root.register_forward_hook(reshard_unless_backward_does)


def _is_float32(module: nn.Module) -> bool:
    return all(parameter.dtype is torch.float32 for parameter in module.parameters())


def _check_experts(model: PreTrainedModel) -> None:
    """FSDP sums the gradients of a unit in one piece. If a rank has no tokens for an expert, it has
    no gradient of it, and earlier versions of torch add the gradients of different experts."""
    if expert_lists(model) and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"{type(model).__name__} has a list of experts with weights of their own, which"
            f" several ranks cannot train with torch {version('torch')}; install torch 2.13, or set"
            " trainer.ranks to 1."
        )


def expert_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Experts that are modules of their own. A pass uses those that have tokens."""
    lists = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    return [module for name, module in lists if name.rpartition(".")[2] == "experts"]


def zero_unused_gradients(model: nn.Module) -> None:
    """Give experts of a list without tokens here a gradient of 0: all ranks sum the same ones."""
    for experts in expert_lists(model):
        for parameter in experts.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _divide(model: PreTrainedModel, root: PreTrainedModel, meshes: ShardingMeshes) -> list[Any]:
    """Apply tensor and expert parallelism; returns the modules of experts that were divided."""
    if meshes.tp is None or meshes.ep is None:
        return []
    from millrace.models.parallel_plans import divide_experts, divide_layers

    if meshes.tp.size() > 1:
        divide_layers(root, meshes.tp)
        model.tie_weights()  # a tied weight was divided twice
    return divide_experts(root, ep=meshes.ep, tp=meshes.tp)


def shard_experts(module: nn.Module, *, like: Tensor) -> None:
    """Shard the parameters [E, ...] of a module, a part of one that is sharded, as the weight of
    these experts is; they are gathered in its dtype. All ranks have the same values."""
    if not isinstance(like, DTensor):
        return
    mesh, names = like.device_mesh, like.device_mesh.mesh_dim_names or ()
    if "ep" in names:
        for name, parameter in [*module.named_parameters()]:
            own = distribute_tensor(parameter.data, mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(own))
        mesh = mesh[tuple(name for name in names if name != "ep")]
    _make_unit(module, mesh=mesh, dtype=like.dtype, reshard_after_forward=True)


def _make_unit(
    module: nn.Module, *, mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any
) -> FSDPModule:
    # Autocast decides the dtype of inputs: residual streams are float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    unit = fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    if mesh.size() > 1:  # alone, a rank would divide all gradients by 1
        unit.set_gradient_divide_factor(1.0)
    # A factor would otherwise be fused with the sum, which gloo cannot do.
    unit.set_force_sum_reduction_for_comms(True)
    return unit


def inside(root: nn.Module, compute: Callable[[], Result]) -> Result:
    """compute() while the root's own weights are whole; its result may be differentiated."""
    return root(compute=compute) if isinstance(root, FSDPModule) else compute()


def whole_units(model: nn.Module) -> Iterator[nn.Module]:
    """The units of a sharded model one after the other, each with whole weights as long as it is
    the current one; the model itself if it is not sharded."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        yield model
    for unit in [*units[1:], *units[:1]]:  # the root is the last
        unit.unshard()
        yield unit
        unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank calls this for the same one."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, part = tensor.device_mesh, tensor.to_local()
    is_gloo = dist.get_backend(mesh.get_group(0)) == dist.Backend.GLOO
    # Over gloo, ranks share a GPU, and torch's gathering of DTensors crashes with device memory.
    # Optimizer state may be on the host, which NCCL cannot send.
    device_type = "cpu" if is_gloo else mesh.device_type
    if part.device.type == mesh.device_type == device_type:
        return tensor.full_tensor()
    moved = DTensor.from_local(
        part.to(device_type),
        _host_mesh(mesh) if is_gloo else mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return moved.full_tensor().to(part.device)


def gathered(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor: rank 0 gets a host copy, other ranks an empty tensor. A plain tensor
    is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    everything = whole(tensor.detach())
    return everything.to("cpu", copy=True) if dist.get_rank() == 0 else torch.empty(0)


@functools.cache
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks for tensors on the host. It has the groups of `mesh`: all ranks would have to
    make new ones together, and ranks have different meshes of tp and ep."""
    groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
    return DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=names)


def shard_like(tensor: Tensor, like: Tensor, *, device: torch.device | None = None) -> Tensor:
    """A whole tensor, sharded as `like` is, on `device` (that of `like`). Nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor if device is None else tensor.to(device)
    mesh, placements = like.device_mesh, like.placements
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    return with_part(part.to(device or like.device, copy=True).contiguous(), like)


def with_part(part: Tensor, like: DTensor) -> DTensor:
    """A tensor that is sharded as `like` is, of which this rank has `part`, on any device.
    DTensor.from_local would move it to the device of the mesh."""
    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def empty_like(like: Tensor, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A tensor without values, sharded as `like` is, on `device` (that of `like`)."""
    part = torch.empty_like(local_part(like), dtype=dtype, device=device)
    return with_part(part, like) if isinstance(like, DTensor) else part


def is_first_owner(tensor: Tensor) -> bool:
    """Whether this is the first rank that has its part of a tensor. All have all of a plain one."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    if not (tensor.device_mesh.mesh == 0).any():  # other ranks have another such mesh
        return False
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank has a part of each of its tensors"
    places = zip(coordinate, tensor.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
