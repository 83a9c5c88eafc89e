"""Engines with routes that no router would choose."""

import torch

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.routing import RoutingRule


class _Astray:
    def __init__(self, inner: RoutingRule, *, num_experts: int, in_pairs: bool) -> None:
        self._inner = inner
        self._num_experts = num_experts
        self._in_pairs = in_pairs

    def choose(self, own: torch.Tensor, *, scores: torch.Tensor) -> torch.Tensor:
        other = own ^ 1 if self._in_pairs else (own + 3) % self._num_experts
        return self._inner.choose(other, scores=scores)


def lead_astray(engine: EmbeddedEngine, *, num_experts: int, in_pairs: bool = False) -> None:
    """Change the routes of an engine so that only replayed routes reproduce its logprobs.
    `in_pairs`: a token goes to the other expert of a pair, because its router gives no weight to
    experts of other groups."""
    for module in engine._model.modules():
        if hasattr(module, "topk_override"):
            rule = module.topk_override.rule
            module.topk_override.rule = _Astray(rule, num_experts=num_experts, in_pairs=in_pairs)
