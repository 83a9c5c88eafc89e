"""Finds the routers of a model: runs it on a few tokens and watches who chooses experts.

Experts are what is called with numbers of experts and weights for them, both [T, K]; their router
is the module in which a topk gave these numbers. Nothing is known by name.
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
_MAX_EXPERTS = 32767  # on a device int16 stands for uint16, of which torch knows little
_REMEDY = "set trainer.replay_routes to false"


def find_routing(model: PreTrainedModel) -> Routing | None:
    """None if it has no experts; raises ConfigError if it has, and not their routers."""
    calls = _calls(model)
    if not calls and not any("expert" in name for name, _ in model.named_modules()):
        return None
    routers = [call.router for call in calls if call.router is not None]
    top_ks = {call.indices.shape[1] for call in calls}
    is_plain = len(top_ks) == 1 and len({router.module for router in routers}) == len(calls)
    if not is_plain or any(router.num_experts > _MAX_EXPERTS for router in routers):
        raise ConfigError(
            f"{type(model).__name__} has experts that are not chosen by one topk in each layer, so"
            f" that their choice cannot be replayed; {_REMEDY}."
        )
    return Routing(routers=tuple(routers), top_k=top_ks.pop())


def check_replay(model: PreTrainedModel, routing: Routing) -> None:
    """Raise ConfigError unless experts get the tokens that a rule says, and weigh them. Leaves
    rules behind that are good for nothing else."""
    rules = [_Fixed(call.indices.roll(1, 0)) for call in _calls(model)]
    routing.install(rules)
    for rule, call in zip(rules, _calls(model), strict=True):
        is_obeyed = torch.equal(call.indices, rule.indices)
        # A router that looks at some experts only would give the others no weight.
        if not is_obeyed or not (call.weights.isfinite() & (call.weights != 0)).all():
            raise ConfigError(
                f"The routers of {type(model).__name__} weigh only experts that they choose"
                f" themselves, so that other choices cannot be replayed; {_REMEDY}."
            )


class _Fixed:
    def __init__(self, indices: Tensor) -> None:
        self.indices = indices  # [T, K]

    def choose(self, own: Tensor) -> Tensor:
        return self.indices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TopkCall:
    """One call of experts."""

    indices: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    router: Router | None  # None = who chose is not to be seen


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pick:
    """One topk."""

    router: Router
    indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TopkWatch:
    running: list[nn.Module] = field(default_factory=list)  # innermost last
    picks: list[_Pick] = field(default_factory=list)  # since experts were last called
    calls: list[_TopkCall] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(module)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given = [tensor for tensor in given if tensor.ndim == 2 and len(tensor) == _TOKENS]
        numbers = [t for t in given if t.dtype in (torch.int64, torch.int32)]
        if not numbers:
            return
        indices = numbers[0]
        weights = [t for t in given if t.is_floating_point() and t.shape == indices.shape]
        if weights:
            picks = [pick for pick in self.picks if torch.equal(pick.indices, indices)]
            router = picks[-1].router if picks else None
            self.calls.append(_TopkCall(indices=indices, weights=weights[0], router=router))
            self.picks.clear()

    def leave(self, module: nn.Module, *_: Any) -> None:
        left = self.running.pop()
        assert left is module

    def pick(self, scores: Tensor, indices: Tensor) -> None:
        if scores.ndim == 2 and len(scores) == _TOKENS and self.running:
            router = Router(module=self.running[-1], num_experts=scores.shape[1])
            self.picks.append(_Pick(router=router, indices=indices))


class _SeesTopk(TorchFunctionMode):
    def __init__(self, watch: _TopkWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_topk(func):
            self._watch.pick(args[0] if args else kwargs["input"], result[1])
        return result


def _calls(model: PreTrainedModel) -> list[_TopkCall]:
    """Of experts, in the order of the layers, in a pass over a few tokens."""
    watch = _TopkWatch()
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(_TOKENS, device=model.device) % vocab_size
    with _watched(model, watch), _seeing_only_oneself(model), torch.no_grad(), _SeesTopk(watch):
        positions = torch.arange(_TOKENS, device=model.device)
        model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
    return watch.calls


@contextmanager
def _watched(model: nn.Module, watch: _TopkWatch) -> Iterator[None]:
    handles = [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(watch.enter, with_kwargs=True),
            module.register_forward_hook(watch.leave),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _seeing_only_oneself(model: PreTrainedModel) -> Iterator[None]:
    """Whatever attention the model was loaded with, none of what it needs has to be there."""
    own = model.config._attn_implementation
    assert own is not None
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
