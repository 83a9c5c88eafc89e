"""Expert routes of mixture-of-experts models: recorded by engines and replayed by the trainer.

Small differences between engine and trainer can send a token to another expert, where two have
almost equal scores, and change its logprob. So the trainer uses the experts that engines record.

The choice is one topk over the scores of all experts in the forward function of a module, the
router, or K calls of max, the second one without the first expert (Phi-3.5-MoE). While a router
runs, a RoutingRule may replace its choice. Scores, weights and gradients remain those of the
router.

Routers are found by running the model on a few tokens, not by name: experts are the modules that
are called with expert indices and weights, both [T, K], and their router is the module in which a
topk, or the calls of max together, returned these indices.

T = tokens of a pass, K = experts per token (top_k), E = experts of a layer.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from millrace.core.completions import unknown_id
from millrace.core.errors import ConfigError
from millrace.models.attention.recurrent import begin_pass
from millrace.models.sharding import inside
from millrace.models.support import PROBE_ATTENTION

_MAX_UINT8_EXPERTS = 255  # one value of a byte is reserved for unknown routes
_MAX_EXPERTS = 32767  # on a device int16 replaces uint16, which torch hardly supports
_PROBE_TOKENS = 7
_REMEDY = "set trainer.replay_routes to false"
ROUTER_BIAS = "e_score_correction_bias"  # of scores; a buffer of DeepSeek-V3, GLM-4.5 and others


class RoutingRule(Protocol):
    """Decides or records the choice of a router. torch.compile traces it."""

    def choose(self, own: Tensor, *, scores: Tensor) -> Tensor:
        """The experts [T, K] int64, given those that the router chose itself by scores [T, E]."""
        ...


class Router(NamedTuple):
    module: nn.Module  # its forward function makes the choice
    num_experts: int
    has_probabilities: bool  # its scores are a distribution over all experts
    calls_max: bool = False  # once per expert, instead of topk


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """The routers of a model, in the order of its layers."""

    routers: tuple[Router, ...]
    top_k: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the routes of one token: layers with a router, experts per token."""
        return len(self.routers), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """The dtype of arrays of routes."""
        most = max(router.num_experts for router in self.routers)
        return np.dtype(np.uint8 if most <= _MAX_UINT8_EXPERTS else np.uint16)

    @property
    def token_bytes(self) -> int:
        """Bytes of the routes of one token."""
        return math.prod(self.shape) * self.dtype.itemsize

    def install(self, rules: Sequence[RoutingRule]) -> None:
        """Make each router use its rule from now on."""
        for router, rule in zip(self.routers, rules, strict=True):
            module: Any = router.module
            module.topk_override = _TopkOverride(rule, router=router, top_k=self.top_k)
            # One function for all routers: torch.compile would compile one program per function.
            forward = _forward_with_max if router.calls_max else _forward_with_override
            module.forward = MethodType(forward, module)


def rule_of(router: Any) -> RoutingRule | None:
    """The rule of a router of which install() was called."""
    override: _TopkOverride | None = getattr(router, "topk_override", None)
    return None if override is None else override.rule


class RouteReplay:
    """Replays recorded routes. Used by the trainer's thread."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._num_experts = max(router.num_experts for router in routing.routers)
        self._rules = [_Replayed() for _ in routing.routers]
        routing.install(self._rules)

    def begin(self, routes: np.ndarray | None, *, device: torch.device) -> None:
        """Set the routes of the next pass, [T, layers, K]; None = routers choose. They hold
        until the next call: gradient checkpointing runs layers again in the backward pass."""
        if routes is None:
            for rule in self._rules:
                rule.rows = None
            return
        shape = self.routing.shape
        assert routes.shape[1:] == shape, (
            f"the routes are of another model: {routes.shape[1:]}, not {shape}"
        )
        known = np.where(routes == unknown_id(routes.dtype), -1, routes.astype(np.int16))
        by_layer = torch.from_numpy(known.swapaxes(0, 1).copy()).to(device, non_blocking=True)
        for rule, rows in zip(self._rules, by_layer, strict=True):
            rule.rows = rows

    def expert_load(self, rows: Tensor) -> Tensor:  # [layers, E] float64
        """The number of times that the last pass sent these rows [N] to each expert."""
        chosen = torch.stack([rule.chosen for rule in self._rules])[:, rows].flatten(1)
        counts = torch.ones_like(chosen, dtype=torch.float64)
        return counts.new_zeros(len(chosen), self._num_experts).scatter_add_(1, chosen, counts)

    def recorded_load(self, routes: Sequence[np.ndarray]) -> np.ndarray:  # [layers, E]
        """The number of times that these routes, [N, layers, K] each, name each expert."""
        load = np.zeros((len(self._rules), self._num_experts))
        for part in routes:
            for of_layer, row in zip(part.swapaxes(0, 1), load, strict=True):
                known = of_layer[of_layer != unknown_id(part.dtype)]
                row += np.bincount(known, minlength=self._num_experts)
        return load

    def penalize(self, load: np.ndarray, *, device: torch.device) -> None:
        """From now on, penalties() are for this load of experts, [layers, E]."""
        shares = load * (self.routing.top_k / load.sum(1, keepdims=True).clip(min=1))
        costs = torch.from_numpy(shares).to(device, torch.float32) * self._num_experts
        for rule, own in zip(self._rules, costs, strict=True):
            rule.costs = own

    def penalties(self) -> Tensor:  # [T]; differentiable
        """The load-balancing loss of each row of the last pass, as a mean over the layers: E Σ f p
        over the experts, of an expert's share f of the tokens and its probability p at the row."""
        return torch.stack([rule.penalty for rule in self._rules]).mean(0)


class _Replayed:
    """The rule of one router: its recorded choice, where that is known."""

    chosen: Tensor  # [T, K]; in the last pass
    penalty: Tensor  # [T]; likewise, if there are costs

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows = rows  # [T, K]; -1 = unknown
        self.costs: Tensor | None = None  # [E]; of probability

    def choose(self, own: Tensor, *, scores: Tensor) -> Tensor:
        self.chosen = own
        if self.rows is not None:
            rows = self.rows.long()
            self.chosen = torch.where(rows < 0, own, rows)
        if self.costs is not None:
            self.penalty = (scores * self.costs).sum(-1)
        return self.chosen

    def with_groups(self, scores: Tensor, *, num_experts: int) -> Tensor:
        """Scores of groups of experts [T, G], of which a router chooses some before it chooses
        experts (DeepSeek-V2): those of the recorded experts are the highest."""
        if self.rows is None:
            return scores
        groups = self.rows.long().clamp_min(0) // (num_experts // scores.shape[1])
        is_wanted = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, groups, self.rows >= 0)
        return scores.masked_fill(is_wanted, torch.inf)


class _TopkResult(NamedTuple):
    values: Tensor
    indices: Tensor


class _TopkOverride(TorchFunctionMode):
    """A mode in which a topk over the experts, or the calls of max, return the choice of a rule."""

    def __init__(self, rule: RoutingRule, *, router: Router, top_k: int) -> None:
        super().__init__()
        self.rule = rule
        self.top_k = top_k
        self.num_experts = router.num_experts
        self._calls_max = router.calls_max
        self.next_max: list[Tensor] = []  # [T, 1] each; what the next calls of max choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._calls_max and is_max(func, kwargs):
            return self._next_max(args[0])
        if not is_topk(func):
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        top_k = args[1] if len(args) > 1 else kwargs["k"]
        has_groups = scores.ndim == 2 and self.num_experts // scores.shape[1] > 1
        if isinstance(self.rule, _Replayed) and has_groups:
            own = func(self.rule.with_groups(scores, num_experts=self.num_experts), top_k)
            return _TopkResult(scores.gather(-1, own[1]), own[1])
        result = func(*args, **kwargs)
        if scores.ndim != 2 or scores.shape[1] != self.num_experts or top_k != self.top_k:
            return result
        chosen = self.rule.choose(result[1], scores=scores)
        return _TopkResult(scores.gather(-1, chosen), chosen)

    def _next_max(self, scores: Tensor) -> _TopkResult:
        if not self.next_max:
            own = torch.topk(scores, self.top_k).indices
            self.next_max = list(self.rule.choose(own, scores=scores).split(1, dim=-1))
        chosen = self.next_max.pop(0)
        return _TopkResult(scores.gather(-1, chosen), chosen)


def is_topk(func: Any) -> bool:
    return func is torch.topk or func is torch.Tensor.topk


def is_max(func: Any, kwargs: dict[str, Any]) -> bool:
    return func is torch.Tensor.max and bool(kwargs.get("keepdim"))


def _forward_with_override(router: Any, *args: Any, **kwargs: Any) -> Any:
    with router.topk_override:
        return type(router).forward(router, *args, **kwargs)


def _forward_with_max(router: Any, *args: Any, **kwargs: Any) -> Any:
    router.topk_override.next_max = []  # a pass that failed may have left some
    return _forward_with_override(router, *args, **kwargs)


def find_routing(model: PreTrainedModel) -> Routing | None:
    """The routers; None for a dense model. Raises ConfigError if routers cannot be found."""
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
    assigned = [call.indices.roll(1, 0) for call in _calls(model)]
    routing.install([_Replayed(rows) for rows in assigned])
    for rows, call in zip(assigned, _calls(model), strict=True):
        is_replayed = torch.equal(call.indices, rows)
        # A router that considers only some experts would give the others no weight.
        if not is_replayed or not (call.weights.isfinite() & (call.weights != 0)).all():
            raise ConfigError(
                f"The routers of {type(model).__name__} give weights only to experts that they"
                f" choose themselves, so routes cannot be replayed; {_REMEDY}."
            )


def check_aux_loss(replay: RouteReplay | None) -> None:
    """Raise ConfigError unless a balancing loss is defined for the routers."""
    if replay is None:
        raise ConfigError(
            "trainer.router_aux_loss needs a mixture of experts and trainer.replay_routes = true;"
            " set it to 0."
        )
    if not all(router.has_probabilities for router in replay.routing.routers):
        raise ConfigError(
            "trainer.router_aux_loss needs routers that choose by softmax probabilities, and those"
            " of this model do not; set it to 0."
        )


def check_bias_update(model: PreTrainedModel, replay: RouteReplay | None) -> None:
    """Raise ConfigError unless each router has a bias that balances experts."""
    if replay is None:
        raise ConfigError(
            "trainer.router_bias_rate needs a mixture of experts and trainer.replay_routes = true;"
            " set it to 0."
        )
    if len(router_biases(model)) != len(replay.routing.routers):
        raise ConfigError(
            "trainer.router_bias_rate needs routers with a balancing bias, as DeepSeek-V3 and"
            f" GLM-4.5 have, and those of {type(model).__name__} have none; set it to 0."
        )


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """The biases [E] that routers add to scores when they choose experts, by name, in the order of
    the layers. They get no gradient."""
    return {n: b for n, b in model.named_buffers() if n.rpartition(".")[2] == ROUTER_BIAS}


def balance_experts(model: nn.Module, load: np.ndarray, *, rate: float) -> None:
    """Raise the biases of experts that computed fewer tokens than the mean of their layer, and
    lower the others, by `rate`: arXiv 2408.15664. `load` [layers, E]: tokens."""
    for bias, row in zip(router_biases(model).values(), load, strict=True):
        bias += rate * torch.from_numpy(np.sign(row.mean() - row)).to(bias)


def policy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a policy by name: every parameter once, and the biases of its routers."""
    return {**dict(model.named_parameters()), **router_biases(model)}


class _ExpertCall(NamedTuple):
    """One call of experts, and the router that chose them."""

    indices: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    router: Router | None  # None = not found


class _CallRecorder(TorchFunctionMode):
    """Records calls of experts; its hooks are registered with every module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_ExpertCall] = []
        self._running: list[nn.Module] = []  # innermost last
        self._topks: list[tuple[Router, Tensor]] = []  # and their indices; since the last call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        calls_max = is_max(func, kwargs)
        if is_topk(func) or calls_max:
            scores = args[0] if args else kwargs["input"]
            if scores.ndim == 2 and len(scores) == _PROBE_TOKENS and self._running:
                sums = scores.sum(-1, dtype=torch.float32)
                router = Router(
                    module=self._running[-1],
                    num_experts=scores.shape[1],
                    has_probabilities=bool(
                        (scores >= 0).all() and torch.allclose(sums, sums.new_ones(()), atol=1e-2)
                    ),
                    calls_max=calls_max,
                )
                earlier = [found for other, found in self._topks if other.module is router.module]
                indices = torch.cat([*(earlier[-1:] if calls_max else ()), result[1]], -1)
                self._topks.append((router, indices))
        return result

    def before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._running.append(module)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        tensors = [t for t in tensors if t.ndim == 2 and len(t) == _PROBE_TOKENS]
        integers = [t for t in tensors if t.dtype in (torch.int64, torch.int32)]
        if not integers:
            return
        indices = integers[0]
        weights = [t for t in tensors if t.is_floating_point() and t.shape == indices.shape]
        if weights:
            routers = [router for router, found in self._topks if torch.equal(found, indices)]
            self.calls.append(_ExpertCall(indices, weights[0], routers[-1] if routers else None))
            self._topks.clear()

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        left = self._running.pop()
        assert left is module


def _calls(model: PreTrainedModel) -> list[_ExpertCall]:
    """The calls of experts in a pass over a few tokens, in the order of the layers."""
    recorder = _CallRecorder()
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    tokens = positions % model.config.get_text_config().vocab_size
    attention = model.config._attn_implementation
    assert attention is not None
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            before = module.register_forward_pre_hook(recorder.before_forward, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(recorder.after_forward).remove)
        stack.callback(model.set_attn_implementation, attention)
        model.set_attn_implementation(PROBE_ATTENTION)  # it needs no layout or cache
        # Frozen weights beneath an adapter may be bfloat16, and all others are float32.
        is_mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
        mixed = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_mixed)
        with torch.no_grad(), mixed, recorder:
            begin_pass(model, None)
            inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
            inside(model, lambda: model.base_model(**inputs, use_cache=False))
    return recorder.calls
