"""Finds the routers of a model by running it on a few tokens.

Experts are the modules that are called with expert indices and weights, both [T, K]. Their router
is the module in which a topk returned these indices. Nothing is found by name.
T = tokens of the pass, K = experts per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.models.moe.routing import Router, Routing, is_topk
from millrace.models.support import PROBE_ATTENTION

_TOKENS = 7
_MAX_EXPERTS = 32767  # on a device int16 replaces uint16, which torch hardly supports
_REMEDY = "set trainer.replay_routes to false"


def find_routing(model: PreTrainedModel) -> Routing | None:
    """The routers of a model; None for a dense model. Raises ConfigError if it has experts whose
    routers cannot be found."""
    calls = _calls(model)
    if not calls and not any("expert" in name for name, _ in model.named_modules()):
        return None
    routers = [call.router for call in calls if call.router is not None]
    top_ks = {call.indices.shape[1] for call in calls}
    is_plain = len(top_ks) == 1 and len({router.module for router in routers}) == len(calls)
    if not is_plain or any(router.num_experts > _MAX_EXPERTS for router in routers):
        raise ConfigError(
            f"{type(model).__name__} does not choose experts by one topk per layer, so routes"
            f" cannot be replayed; {_REMEDY}."
        )
    return Routing(routers=tuple(routers), top_k=top_ks.pop())


def check_replay(model: PreTrainedModel, routing: Routing) -> None:
    """Raise ConfigError unless experts get the tokens that a rule assigns, with weights. The rules
    of this check stay installed until others replace them."""
    rules = [_Fixed(call.indices.roll(1, 0)) for call in _calls(model)]
    routing.install(rules)
    for rule, call in zip(rules, _calls(model), strict=True):
        is_replayed = torch.equal(call.indices, rule.indices)
        # A router that considers only some experts would give the others no weight.
        if not is_replayed or not (call.weights.isfinite() & (call.weights != 0)).all():
            raise ConfigError(
                f"The routers of {type(model).__name__} give weights only to experts that they"
                f" choose themselves, so routes cannot be replayed; {_REMEDY}."
            )


class _Fixed:
    def __init__(self, indices: Tensor) -> None:
        self.indices = indices  # [T, K]

    def choose(self, own: Tensor) -> Tensor:
        return self.indices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ExpertCall:
    """One call of experts, and the router that chose them."""

    indices: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    router: Router | None  # None = not found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Topk:
    """One topk, and the module that called it."""

    router: Router
    indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CallRecorder:
    running: list[nn.Module] = field(default_factory=list)  # innermost last
    topks: list[_Topk] = field(default_factory=list)  # since the last call of experts
    calls: list[_ExpertCall] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(module)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        tensors = [tensor for tensor in tensors if tensor.ndim == 2 and len(tensor) == _TOKENS]
        integers = [t for t in tensors if t.dtype in (torch.int64, torch.int32)]
        if not integers:
            return
        indices = integers[0]
        weights = [t for t in tensors if t.is_floating_point() and t.shape == indices.shape]
        if weights:
            topks = [topk for topk in self.topks if torch.equal(topk.indices, indices)]
            router = topks[-1].router if topks else None
            self.calls.append(_ExpertCall(indices=indices, weights=weights[0], router=router))
            self.topks.clear()

    def leave(self, module: nn.Module, *_: Any) -> None:
        left = self.running.pop()
        assert left is module

    def record_topk(self, scores: Tensor, indices: Tensor) -> None:
        if scores.ndim == 2 and len(scores) == _TOKENS and self.running:
            router = Router(module=self.running[-1], num_experts=scores.shape[1])
            self.topks.append(_Topk(router=router, indices=indices))


class _TopkMode(TorchFunctionMode):
    def __init__(self, recorder: _CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_topk(func):
            self._recorder.record_topk(args[0] if args else kwargs["input"], result[1])
        return result


def _calls(model: PreTrainedModel) -> list[_ExpertCall]:
    """The calls of experts in a pass over a few tokens, in the order of the layers."""
    recorder = _CallRecorder()
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(_TOKENS, device=model.device) % vocab_size
    with (
        _recorded(model, recorder),
        _attending_to_self(model),
        torch.no_grad(),
        _TopkMode(recorder),
    ):
        positions = torch.arange(_TOKENS, device=model.device)
        model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
    return recorder.calls


@contextmanager
def _recorded(model: nn.Module, recorder: _CallRecorder) -> Iterator[None]:
    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(recorder.enter, with_kwargs=True),
            module.register_forward_hook(recorder.leave),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _attending_to_self(model: PreTrainedModel) -> Iterator[None]:
    """A context with the probe attention, which needs no layout or cache."""
    own = model.config._attn_implementation
    assert own is not None
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
