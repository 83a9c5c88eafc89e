"""PEFT's layout of expert adapters in files, and ours.

PEFT wraps the module of experts once for each adapted parameter, so the tensors of the first one
lie deepest: `experts.base_layer.lora_A.weight`. It stores A as [E R, I] and B as [O, R E]. We name
tensors after the parameter, as for linear layers, and store A as [E, R, I] and B as [E, O, R].

E = experts, R = rank, I and O = input and output size.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from millrace.models.lora.experts import EXPERT_WEIGHTS

_A, _B = ".lora_A.weight", ".lora_B.weight"
_WRAPPER = ".base_layer"


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names and in its shapes."""
    adapted = [name.removesuffix(_A) for name, t in tensors.items() if t.ndim == 3 and _A in name]
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            renamed[name] = tensor
            continue
        layer, _, part = name.partition(".lora_")
        module, _, weight = layer.rpartition(".")
        own = _wrapped(module, adapted)
        depth = len(own) - 1 - own.index(weight)
        if part.startswith("A"):
            tensor = tensor.flatten(0, 1)
        else:
            tensor = tensor.permute(1, 2, 0).flatten(1)
        renamed[f"{module}{_WRAPPER * depth}.lora_{part}"] = tensor.contiguous()
    return renamed


def from_peft(
    tensors: Mapping[str, Tensor], *, targets: Iterable[str], rank: int
) -> dict[str, Tensor]:
    """The tensors by our names and in our shapes. `targets`: PEFT's target_parameters."""
    targets = list(targets)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(".lora_")
        module = stem
        while module.endswith(_WRAPPER):
            module = module.removesuffix(_WRAPPER)
        depth = (len(stem) - len(module)) // len(_WRAPPER)
        own = _wrapped(module, targets)
        is_a = part.startswith("A")
        # A target may be the last part of a name, so any module could have it: shapes tell.
        if depth >= len(own) or tensor.shape[0 if is_a else -1] == rank:
            renamed[name] = tensor
        elif is_a:
            renamed[f"{module}.{own[-1 - depth]}{_A}"] = tensor.unflatten(0, (-1, rank))
        else:
            shaped = tensor.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
            renamed[f"{module}.{own[-1 - depth]}{_B}"] = shaped
    return renamed


def _wrapped(module: str, targets: Iterable[str]) -> list[str]:
    """The adapted weights of a module, in the order in which PEFT wraps them."""
    names = {weight: f"{module}.{weight}" for weight in EXPERT_WEIGHTS}
    return [
        weight
        for weight, name in names.items()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    ]
