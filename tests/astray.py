"""Engines with routes that no router would choose."""

import torch

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.routing import RoutingRule


class _Astray:
    def __init__(self, inner: RoutingRule, *, num_experts: int) -> None:
        self._inner = inner
        self._num_experts = num_experts

    def choose(self, own: torch.Tensor, *, scores: torch.Tensor) -> torch.Tensor:
        return self._inner.choose((own + 3) % self._num_experts, scores=scores)


def lead_astray(engine: EmbeddedEngine, *, num_experts: int) -> None:
    """Change the routes of an engine so that only replayed routes reproduce its logprobs."""
    for module in engine._model.modules():
        if hasattr(module, "topk_override"):
            module.topk_override.rule = _Astray(module.topk_override.rule, num_experts=num_experts)
