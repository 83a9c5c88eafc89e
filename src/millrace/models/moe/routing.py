"""Which experts a mixture-of-experts model sends its tokens to: one seam to note it and to decide.

Engine and trainer compute the same hidden states with small differences, and where two experts are
almost equally good, that is enough to send a token to another one: then its logprob is another,
too. So the engine notes where each token went, and the trainer sends it there again.

The choice is one topk over the scores of all experts, in the forward function of some module: its
router. Routers are found by what they do, not by what they are called (router_search.py). While a
router runs, a Rule is asked what it chose. Scores, weights and gradients stay the router's own.

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

_MAX_BYTE = 255  # experts whose numbers leave one of a byte's free


class Rule(Protocol):
    """Says what a router chose. torch.compile looks through it."""

    def choose(self, own: Tensor) -> Tensor:
        """[T, K] int64, given what the router itself would choose."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    module: nn.Module  # in whose forward the choice is made
    num_experts: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """The routers of a model, in the order of its layers."""

    routers: tuple[Router, ...]
    top_k: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of a row of routes: layers with a router, and experts per token."""
        return len(self.routers), self.top_k

    @property
    def dtype(self) -> np.dtype:
        """Of arrays of routes."""
        most = max(router.num_experts for router in self.routers)
        return np.dtype(np.uint8 if most <= _MAX_BYTE else np.uint16)

    @property
    def token_bytes(self) -> int:
        """Of the routes of one token."""
        num_layers, top_k = self.shape
        return num_layers * top_k * self.dtype.itemsize

    def install(self, rules: Sequence[Rule]) -> None:
        """Have each router ask its rule from now on."""
        for router, rule in zip(self.routers, rules, strict=True):
            module: Any = router.module
            module.choosing = _Choosing(rule, top_k=self.top_k, num_experts=router.num_experts)
            # One function for all routers: of functions of their own, torch.compile would want to
            # make a program for each.
            module.forward = MethodType(_choosing_forward, module)


class RouteReplay:
    """Sends tokens where they went before. Used by the trainer's thread."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._rules = [_Replayed() for _ in routing.routers]
        routing.install(self._rules)

    def begin(self, routes: np.ndarray | None, *, device: torch.device) -> None:
        """Of the next pass: [T, layers, K], or None to let routers choose. It stays so until this
        is called again: a backward pass that computes layers anew needs them, too."""
        if routes is None:
            for rule in self._rules:
                rule.rows = None
            return
        shape = self._routing.shape
        assert routes.shape[1:] == shape, (
            f"routes of another model: {routes.shape[1:]}, not {shape}"
        )
        known = np.where(routes == unknown_id(routes.dtype), -1, routes.astype(np.int16))
        by_layer = torch.from_numpy(known.swapaxes(0, 1).copy()).to(device, non_blocking=True)
        for rule, rows in zip(self._rules, by_layer, strict=True):
            rule.rows = rows


class _Replayed:
    """Of one router: what it chose before, where that is known."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [T, K] int16; -1 = not known

    def choose(self, own: Tensor) -> Tensor:
        if self.rows is None:
            return own
        rows = self.rows.long()
        return torch.where(rows < 0, own, rows)


class _Chosen(NamedTuple):
    """What a topk returns."""

    values: Tensor
    indices: Tensor


class _Choosing(TorchFunctionMode):
    """Within it, a topk over the experts gives what a rule says."""

    def __init__(self, rule: Rule, *, top_k: int, num_experts: int) -> None:
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
            return result  # of groups of experts, say
        chosen = self.rule.choose(result[1])
        return _Chosen(scores.gather(-1, chosen), chosen)


def is_topk(func: Any) -> bool:
    return func is torch.topk or func is torch.Tensor.topk


def _choosing_forward(router: Any, *args: Any, **kwargs: Any) -> Any:
    with router.choosing:
        return type(router).forward(router, *args, **kwargs)
