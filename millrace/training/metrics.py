"""What one step says about itself, gathered over its microbatches.

Promise: every mean is over the trained tokens of the whole batch, so no number depends on how the
batch was split. Sums stay on the device, in float64, until the step is over: one wait per step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from millrace.training.losses import TokenBatch


class StepMetrics:
    """Used by one step, in the trainer's thread."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._ratio_max: Tensor | None = None
        self._loss: Tensor | None = None
        self._num_tokens = 0
        self._num_microbatches = 0

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: Tensor, named: Mapping[str, Tensor]) -> None:
        """One microbatch; `named` are the loss's own per-token metrics."""
        log_ratio = tokens.trainer_logprobs.double() - tokens.engine_logprobs
        ratio = log_ratio.exp()
        per_token = {
            "entropy": tokens.entropies,
            "ratio_mean": ratio,
            # Tokens were drawn by the engine, so both estimate KL(engine || trainer).
            "kl_k1": -log_ratio,
            "kl_k3": ratio - 1 - log_ratio,
            "logprob_mismatch": log_ratio.abs(),
            **named,
        }
        for name, values in per_token.items():
            total = values.sum(dtype=torch.float64)
            self._sums[name] = total if name not in self._sums else self._sums[name] + total
        ratio_max = ratio.max()
        if self._ratio_max is not None:
            ratio_max = torch.maximum(ratio_max, self._ratio_max)
        self._ratio_max = ratio_max
        self._loss = loss.double() if self._loss is None else self._loss + loss
        self._num_tokens += len(ratio)
        self._num_microbatches += 1

    def summary(self) -> dict[str, float]:
        """Needs at least one microbatch."""
        assert self._loss is not None, "add() comes before summary()"
        assert self._ratio_max is not None
        names = list(self._sums)
        means = torch.stack([self._sums[name] for name in names]) / self._num_tokens
        values = torch.cat([means, torch.stack([self._loss, self._ratio_max])]).tolist()
        return {
            **dict(zip([*names, "loss", "ratio_max"], values, strict=True)),
            "trained_tokens": float(self._num_tokens),
            "microbatches": float(self._num_microbatches),
        }
