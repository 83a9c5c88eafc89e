"""Expert routes of mixture-of-experts models: recorded by engines and replayed by the trainer.

Engine and trainer compute hidden states with small differences. Where two experts have almost equal
scores, that can send a token to another expert and change its logprob. So the engine records the
experts of each token, and the trainer uses the same ones.

The choice is one topk over the scores of all experts in the forward function of a module, the
router. Routers are found by what they compute, not by name (router_search.py). While a router runs,
a RoutingRule may replace its choice. Scores, weights and gradients remain those of the router.

T = tokens of a pass, K = experts per token (top_k).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from millrace.core.completions import unknown_id

_MAX_UINT8_EXPERTS = 255  # one value of a byte is reserved for unknown routes


class RoutingRule(Protocol):
    """Decides or records the choice of a router. torch.compile traces it."""

    def choose(self, own: Tensor) -> Tensor:
        """The experts [T, K] int64, given those that the router chose itself."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    module: nn.Module  # its forward function makes the choice
    num_experts: int


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
        num_layers, top_k = self.shape
        return num_layers * top_k * self.dtype.itemsize

    def install(self, rules: Sequence[RoutingRule]) -> None:
        """Make each router use its rule from now on."""
        for router, rule in zip(self.routers, rules, strict=True):
            module: Any = router.module
            module.topk_override = _TopkOverride(
                rule, top_k=self.top_k, num_experts=router.num_experts
            )
            # One function for all routers: torch.compile would compile one program per function.
            module.forward = MethodType(_forward_with_override, module)


class RouteReplay:
    """Replays recorded routes. Used by the trainer's thread."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._rules = [_Replayed() for _ in routing.routers]
        routing.install(self._rules)

    def begin(self, routes: np.ndarray | None, *, device: torch.device) -> None:
        """Set the routes of the next pass, [T, layers, K]; None = routers choose. They stay in
        effect until the next call, because gradient checkpointing runs layers again in the backward
        pass."""
        if routes is None:
            for rule in self._rules:
                rule.rows = None
            return
        shape = self._routing.shape
        assert routes.shape[1:] == shape, (
            f"the routes are of another model: {routes.shape[1:]}, not {shape}"
        )
        known = np.where(routes == unknown_id(routes.dtype), -1, routes.astype(np.int16))
        by_layer = torch.from_numpy(known.swapaxes(0, 1).copy()).to(device, non_blocking=True)
        for rule, rows in zip(self._rules, by_layer, strict=True):
            rule.rows = rows


class _Replayed:
    """The rule of one router: its recorded choice, where that is known."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [T, K] int16; -1 = unknown

    def choose(self, own: Tensor) -> Tensor:
        if self.rows is None:
            return own
        rows = self.rows.long()
        return torch.where(rows < 0, own, rows)


class _TopkResult(NamedTuple):
    """The result of a topk."""

    values: Tensor
    indices: Tensor


class _TopkOverride(TorchFunctionMode):
    """A mode in which a topk over the experts returns the choice of a rule."""

    def __init__(self, rule: RoutingRule, *, top_k: int, num_experts: int) -> None:
        super().__init__()
        self.rule = rule
        self.top_k = top_k
        self.num_experts = num_experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_topk(func):
            return result
        scores = args[0] if args else kwargs["input"]
        top_k = args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or scores.shape[1] != self.num_experts or top_k != self.top_k:
            return result  # over groups of experts, for example
        chosen = self.rule.choose(result[1])
        return _TopkResult(scores.gather(-1, chosen), chosen)


def is_topk(func: Any) -> bool:
    return func is torch.topk or func is torch.Tensor.topk


def _forward_with_override(router: Any, *args: Any, **kwargs: Any) -> Any:
    with router.topk_override:
        return type(router).forward(router, *args, **kwargs)
