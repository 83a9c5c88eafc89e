"""Tensor and expert parallelism by transformers' plans, and the parts of adapters that follow them.

Promise: a divided model computes what it computes on one rank. Ranks that differ only in tp have
the same hidden states, and the same gradients of weights that are not divided over tp.

- Tensor parallelism divides linear layers, embeddings and head by the plan of the model.
- Expert parallelism gives each rank of ep whole experts, and tokens travel to them. With tensor
  parallelism alone there is one such rank, and ranks of tp send different tokens to their experts.
- Factors of an adapter are divided if their side of the layer is, and magnitudes of DoRA if the
  outputs are. The norms of DoRA are those of whole rows.

Imported only for such a model: earlier versions of transformers lack these plans.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from millrace.core.errors import ConfigError
from millrace.models.sharding import local_part, shard_like

_EXPERTS = "ep_dispatch_experts"  # the style of a module of experts
_COLUMNS, _ROWS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
# Every rank computes the compressed keys and values of all heads, as in DeepSeek-V2. Some outputs,
# the rotary part of keys, go to the heads without another divided layer between, so the style sums
# their gradients.
_COMPRESSED = "mla_kv_a_proj"
# The dimension of a weight that a style divides. The parts of other styles are no slices of their
# weights, or their gradients are not known.
_STYLES = {
    **dict.fromkeys((_COLUMNS, "colwise_gather_output", "colwise_rep", "embedding_rowwise"), 0),
    **dict.fromkeys((_ROWS, "rowwise_split_input", "rowwise_rep"), 1),
    **dict.fromkeys((_SUMMED, _COMPRESSED), None),
}


def check_division(config: PreTrainedConfig, *, tp: int) -> None:
    """Raise ConfigError unless tp ranks can divide the layers of such a model."""
    with torch.device("meta"):
        _checked_plan(AutoModelForCausalLM.from_config(config), tp=tp)


def _checked_plan(root: PreTrainedModel, *, tp: int) -> dict[str, str]:
    """Parts of equal size, because FSDP shards them further."""
    plan, kind = _tensor_plan(root), type(root).__name__
    if not plan:
        raise ConfigError(
            f"transformers has no plan of tensor parallelism for {kind}; set trainer.mesh.tp to 1."
        )
    if unknown := sorted({*plan.values()} - _STYLES.keys()):
        raise ConfigError(
            f"The plan of tensor parallelism for {kind} uses {unknown[0]!r}, which is not"
            " supported; set trainer.mesh.tp to 1."
        )
    for name, module in root.named_modules():
        dim = _STYLES[plan.get(replace_layer_number_by_wildcard(name), _SUMMED)]
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and weight.shape[dim] % tp:
            raise ConfigError(
                f"The weight of {name!r} in {kind} has the shape {list(weight.shape)}, which"
                f" trainer.mesh.tp = {tp} ranks cannot share evenly; choose a divisor of"
                f" {weight.shape[dim]}."
            )
    return plan


def divide_layers(root: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide linear layers, embeddings and head over the mesh."""
    plan = _checked_plan(root, tp=mesh.size())
    summed = {name for name, style in plan.items() if style == _SUMMED}
    apply_tensor_parallelism(root, mesh, {n: s for n, s in plan.items() if n not in summed})
    for name, module in root.named_modules():
        if replace_layer_number_by_wildcard(name) in summed:
            module.register_forward_pre_hook(_summing_gradients(mesh.get_group()))


def _summing_gradients(group: Any) -> Any:
    """A hook for a module between divided layers, such as the norm of each head: each rank has a
    part of the gradient of its weights. The style of transformers replaces the forward function,
    as fused norms do."""
    hooked: set[nn.Parameter] = set()

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total

    def before_forward(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            for parameter in {p for p in module.parameters() if p.requires_grad} - hooked:
                parameter.register_hook(summed)  # before it is added to that of other microbatches
                hooked.add(parameter)

    return before_forward


def divide_experts(root: PreTrainedModel, *, ep: DeviceMesh, tp: DeviceMesh) -> list[Any]:
    """Divide experts over `ep`; returns their modules, none of a dense model."""
    plan = root.ep_plan
    experts: list[Any] = [
        module
        for name, module in root.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == _EXPERTS
    ]
    for module in experts:
        module.local_forward = module.forward
        # Looked up in each call: adapters and the trainer replace local_forward.
        module.forward = lambda *args, own=module: own.local_forward(*args)
    if experts:
        apply_expert_parallelism(root, ep, tp, plan)
    for module in experts:
        # A copy of the output: a model that adds to a view in place, as of shared experts, would
        # undo what FSDP attached to it.
        module.forward = lambda *args, forward=module.forward: forward(*args).clone()
    return experts


def _tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Styles by name, without those of experts."""
    experts = tuple(f"{name}." for name, style in model.ep_plan.items() if style == _EXPERTS)
    plan = dict(model.tp_plan)
    for name, style in model.tp_plan.items():
        # The layer of queries that are not compressed, which the plan of GLM-4-MoE-Lite lacks.
        plan.setdefault(re.sub(r"\.q_b_proj$", ".q_proj", name), style)
    return {name: style for name, style in plan.items() if not f"{name}.".startswith(experts)}


def divide_factors(
    model: PreTrainedModel, linears: Mapping[str, Any], mesh: DeviceMesh, *, adapter: str
) -> None:
    """Divide the factors of PEFT's layers, by name, as the layers beneath them are divided over
    the mesh."""
    plan = _tensor_plan(model)
    for name, layer in linears.items():
        style = plan.get(replace_layer_number_by_wildcard(name), _SUMMED)
        if style == _COMPRESSED:
            # The gradients of factors and magnitudes come from the same outputs.
            del layer.base_layer.forward
            layer.config = layer.base_layer.config
            ALL_PARALLEL_STYLES[style].install_forward(layer, mesh)
        elif style in (_COLUMNS, _ROWS):  # else inputs and outputs are whole
            factor = (layer.lora_B if style == _COLUMNS else layer.lora_A)[adapter]
            ALL_PARALLEL_STYLES[style].shard_param(factor, "weight", mesh)
            ALL_PARALLEL_STYLES[style].install_forward(factor, mesh)
        if _STYLES[style] is not None and adapter in layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector[adapter]
            if style == _COLUMNS:
                ALL_PARALLEL_STYLES[style].shard_param(magnitude, "weight", mesh)
            magnitude.forward = functools.partial(_scaled_update, magnitude, style)


def _scaled_update(
    magnitude: Any,
    style: str,
    x: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: Tensor,
    **_: Any,
) -> Tensor:
    """What DoRA adds to the output of its base layer, of which this rank has a part of the weight.
    PEFT's own function needs the whole weight."""
    outputs = [Shard(0) if style == _COLUMNS else Replicate()]
    with torch.no_grad():  # norms are constants in the backward pass
        weight, update = base_layer.weight, local_part(lora_B.weight) @ local_part(lora_A.weight)
        if style not in (_COLUMNS, _ROWS):  # the factors are whole
            update = local_part(shard_like(update, weight))
        part = local_part(weight)
        squares = (part + scaling * update.to(part.dtype)).square().sum(1)
        divided = [Partial() if _STYLES[style] == 1 else Shard(0)]
        of_rows = DTensor.from_local(squares, weight.device_mesh, divided, run_check=False)
        norms = of_rows.redistribute(placements=outputs).to_local().sqrt()
    if base_layer.bias is not None:
        base_result = base_result - base_layer.bias.redistribute(placements=outputs).to_local()
    scale = local_part(magnitude.weight) / norms
    return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
