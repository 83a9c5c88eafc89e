"""How a model is trained: precision, optimizer, learning-rate schedule and float16 loss scale.

Optimizers work on the shards of a sharded model. Muon needs whole matrices, so it gathers one
matrix at a time; all ranks compute its update, and each keeps its shard.

Most gradients of a language model are smaller than the smallest float16 number. So the loss is
multiplied by a power of two before the backward pass and the gradients are divided by it
afterwards. The power is as large as it has recently been without an overflow.
"""

import functools
import importlib.util
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.errors import CheckpointError, ConfigError
from millrace.core.plugins import load_reference
from millrace.models.exact.mode import ExactMode
from millrace.models.sharding import decoder_layers, local_part, whole
from millrace.training.offload import OffloadedOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings that the policy and its critic share."""

    optimizer: str = ADAMW  # or MUON, ADAMW_8BIT, "module:Class" of a torch.optim.Optimizer
    optimizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0  # of matrices; norms and biases are not decayed
    max_grad_norm: float = 1.0
    offload_optimizer: bool = False  # its state is in host memory
    compute_dtype: torch.dtype = torch.float32  # weights and optimizer state are always float32
    gradient_checkpointing: bool = False
    compile_layers: bool = False
    exact: bool = False  # logprobs are bit for bit those of the engines

    def numerics(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which matrix products run in compute_dtype."""
        if self.exact:
            return ExactMode(self.compute_dtype)
        is_half = self.compute_dtype is not torch.float32
        # The cache would hold all weights in 16 bits until the end of the forward pass, and a pass
        # that checkpoints layers has no other use for them.
        caches = not self.gradient_checkpointing
        return torch.autocast(
            device.type, dtype=self.compute_dtype, enabled=is_half, cache_enabled=caches
        )

    def before_head(self, hidden: Tensor) -> Tensor:
        """Hidden states as the head multiplies them; autocast rounds them itself."""
        return hidden.to(self.compute_dtype) if self.exact else hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Learning rate by step. It depends on the step alone, so it has no state in checkpoints."""

    learning_rate: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int
    min_share: float = 0.0  # of learning_rate, at total_steps; linear and cosine

    def at(self, step: int) -> float:
        """`step` counts from 0; warm-up reaches the full rate at step warmup_steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.min_share + (1 - self.min_share) * self._height(step))

    def _height(self, step: int) -> float:
        """Decay from 1 after warm-up to 0 at total_steps."""
        if self.kind == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, progress)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of all parameters; the trainer sets the learning rate before each step."""
    if settings.optimizer == MUON:
        made = _muon(model, settings)
    else:
        groups = _groups((p for p in model.parameters() if p.requires_grad), settings)
        if settings.optimizer == ADAMW:
            made = AdamWOfShards(groups, lr=0.0, betas=settings.betas, fused=True)
        elif settings.optimizer == ADAMW_8BIT:
            made = _adamw_8bit(groups, settings)
        else:
            made = _user_optimizer(groups, settings)
    if settings.offload_optimizer:
        made = OffloadedOptimizer(made)
    for group in made.param_groups:
        group["type"] = settings.optimizer
    made.register_load_state_dict_pre_hook(functools.partial(_check_type, settings.optimizer))
    if settings.optimizer in (ADAMW, ADAMW_8BIT, MUON):  # others may change theirs as they step
        made.register_load_state_dict_pre_hook(_keep_settings)
    return made


def _check_type(name: str, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:  # earlier checkpoints have no type
        if (found := group.get("type", name)) != name:
            raise CheckpointError(
                f"The checkpoint was written with optimizer.type = {found!r}, and the run has"
                f" {name!r}, which cannot use its state; set optimizer.type to {found!r}."
            )


def _keep_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the settings of this optimizer: a run may be resumed with others."""
    groups = [
        {**saved, **{key: own[key] for key in ("betas", "weight_decay") if key in own}}
        for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {**state, "param_groups": groups}


def _groups(parameters: Iterable[Tensor], settings: TrainSettings) -> list[dict[str, Any]]:
    """Parameter groups. Norms and biases are not decayed: that changes scale, not complexity. A
    fused update takes parameters of one mesh, and experts may have a mesh of their own."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[parameter.ndim < 2, mesh].append(parameter)
    return [
        {"params": params, "weight_decay": 0.0 if is_vector else settings.weight_decay}
        for (is_vector, _), params in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _user_optimizer(groups: list[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    name = settings.optimizer  # the user's own class, given lr and the further keys of [optimizer]
    try:
        made = load_reference(name)(groups, lr=0.0, **settings.optimizer_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section 'optimizer' does not fit {name!r}: {error}.") from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.type = {name!r} is not a torch.optim.Optimizer.")
    return made


def require_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"optimizer.type = {ADAMW_8BIT!r} needs torchao, which is not installed; run `pip"
            f" install torchao`, or use {ADAMW!r} with optimizer.offload = true."
        )


def _adamw_8bit(groups: list[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    require_torchao()
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    made = AdamW8bit(groups, lr=0.0, betas=settings.betas)
    made.register_step_pre_hook(_learning_rates_to_tensors)
    return made


def _learning_rates_to_tensors(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """torchao compiles its update, and a learning rate that is a number would be a constant."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


class AdamWOfShards(torch.optim.AdamW):
    """AdamW on each rank's own parts. A fused call with hundreds of DTensors would take the host
    half as long as the update takes a GPU."""

    def _init_group(  # pyright: ignore[reportIncompatibleMethodOverride] - called by position
        self, group: dict[str, Any], *lists: list[Any]
    ) -> bool:
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return is_complex


def _muon(model: nn.Module, settings: TrainSettings) -> "MuonAdamW":
    hidden = {p for layer in decoder_layers(model) for p in layer.parameters() if p.ndim == 2}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter in hidden]
    if not matrices:
        raise ConfigError(
            f"optimizer.type = {MUON!r} found no trained matrix in the layers of"
            f" {type(model).__name__}; use {ADAMW!r}."
        )
    others = (parameter for parameter in trained if parameter not in hidden)
    return MuonAdamW(
        {"params": matrices, "weight_decay": settings.weight_decay},
        _groups(others, settings),
        betas=settings.betas,
    )


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers and AdamW for all else: embeddings, head, norms, biases
    and stacked experts. Both make steps of similar size, so they share a learning rate."""

    def __init__(
        self, matrices: dict[str, Any], others: list[dict[str, Any]], *, betas: tuple[float, float]
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {
            MUON: torch.optim.Muon([matrices], lr=0.0, adjust_lr_fn="match_rms_adamw")
        }
        if others:
            self._parts[ADAMW] = AdamWOfShards(others, lr=0.0, betas=betas, fused=True)
        groups = [
            {**group, "algorithm": name}
            for name, part in self._parts.items()
            for group in part.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if group["algorithm"] != MUON:
                self._step_part(group, self.state)
                continue
            # With tensor parallelism, some factors of an adapter are divided.
            plain = [p for p in group["params"] if not isinstance(p, DTensor)]
            if plain:
                self._step_part({**group, "params": plain}, self.state)
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_gathered(group, parameter)

    def _step_part(self, group: dict[str, Any], state: Any) -> None:
        part = self._parts[group["algorithm"]]
        part.param_groups, part.state = [group], state
        part.step()

    def _step_gathered(self, group: dict[str, Any], shard: DTensor) -> None:
        assert isinstance(shard.grad, DTensor)
        moment = self.state[shard].setdefault("momentum_buffer", torch.zeros_like(shard.grad))
        matrix, whole_moment = nn.Parameter(whole(shard.detach())), whole(moment)
        matrix.grad = whole(shard.grad)
        state = {matrix: {"momentum_buffer": whole_moment}}
        self._step_part({**group, "params": [matrix]}, state)
        for part, full in ((shard, matrix.detach()), (moment, whole_moment)):
            part.copy_(
                distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)
            )


_INITIAL = 2.0**16
_MAX = 2.0**24
_GROWTH_INTERVAL = 200  # updates without overflow before the scale is doubled


class LossScale:
    """Dynamic loss scale; 1 if it is off. Used by the trainer's thread."""

    def __init__(self, *, is_on: bool) -> None:
        self.value = _INITIAL if is_on else 1.0
        self._is_on = is_on
        self._num_good = 0

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        if self._is_on:
            for gradient in gradients:
                gradient.div_(self.value)

    def lower(self) -> bool:
        """Halve the scale after an overflow; False if the scale cannot be the reason."""
        self._num_good = 0
        if self.value <= 1.0:
            return False
        self.value /= 2
        return True

    def succeeded(self) -> None:
        """Count an update with finite gradients, and double the scale now and then."""
        self._num_good += 1
        if self._is_on and self._num_good % _GROWTH_INTERVAL == 0:
            self.value = min(2 * self.value, _MAX)
