"""Metrics of one step, accumulated over its microbatches.

Promise: every mean is over the trained tokens of the whole step, so no number depends on how it was
split. Sums stay on the device, in float64, until the step is over: one wait per step. Ranks can add
their sums, so the metrics of several ranks are those of the whole step, too.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from millrace.core.completions import unknown_id
from millrace.core.microbatch import Batch
from millrace.training.losses.loss import TokenBatch

# Histogram of log ratios for quantiles: they are right to 1 %. A ratio of 1 is the middle of a bin,
# so the quantiles of on-policy tokens are exactly 1.
LOG_RANGE = 2.0
NUM_BINS = 401
QUANTILES = {"ratio/p01": 0.01, "ratio/p99": 0.99}


class StepMetrics:
    """Sums of one step or one microbatch. Used by the trainer's thread."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # each a number, except the histogram [NUM_BINS]
        self._extremes: Tensor | None = None  # [2] float64; the largest ratio, minus the smallest
        self._num_tokens = 0
        self._num_microbatches = 0

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: Tensor, named: Mapping[str, Tensor]) -> None:
        """Add a microbatch; `named` are per-token metrics of the loss."""
        log_ratio = tokens.trainer_logprobs.double() - tokens.engine_logprobs
        ratio = log_ratio.exp()
        per_token = {
            "entropy": tokens.entropies,
            "ratio/mean": ratio,
            # The engine sampled the tokens, so all three estimate KL(engine || trainer).
            "mismatch/kl_k1": -log_ratio,
            "mismatch/kl_k2": log_ratio.square() / 2,
            "mismatch/kl_k3": ratio - 1 - log_ratio,
            "mismatch/logprob": log_ratio.abs(),
            "_ratio_squares": ratio.square(),
            **named,
        }
        sums = {name: values.sum(dtype=torch.float64) for name, values in per_token.items()}
        sums["_loss"] = loss.double()
        sums["_histogram"] = _histogram(log_ratio)
        self._accumulate(sums, torch.stack([ratio.max(), -ratio.min()]))
        self._num_tokens += len(ratio)
        self._num_microbatches += 1

    def extend(self, other: "StepMetrics") -> None:
        assert other._extremes is not None, "the other part is empty"
        self._accumulate(other._sums, other._extremes)
        self._num_tokens += other._num_tokens
        self._num_microbatches += other._num_microbatches

    @property
    def loss(self) -> Tensor:
        return self._sums["_loss"]

    def summary(self) -> dict[str, float]:
        """The metrics by name; needs at least one microbatch."""
        assert self._extremes is not None, "add() comes before summary()"
        means = {n: s / self._num_tokens for n, s in self._sums.items() if not n.startswith("_")}
        squares = self._sums["_ratio_squares"] / self._num_tokens
        tensors = {
            **means,
            "loss": self.loss,
            "ratio/max": self._extremes[0],
            "ratio/min": -self._extremes[1],
            # As a share of the tokens: (sum r)^2 / (n sum r^2).
            "ratio/effective_sample_size": means["ratio/mean"].square() / squares,
            **_quantiles(self._sums["_histogram"]),
        }
        values = torch.stack(list(tensors.values())).tolist()
        return {
            **dict(zip(tensors, values, strict=True)),
            "batch/trained_tokens": float(self._num_tokens),
            "batch/microbatches": float(self._num_microbatches),
        }

    def _accumulate(self, sums: Mapping[str, Tensor], extremes: Tensor) -> None:
        for name, total in sums.items():
            self._sums[name] = total if name not in self._sums else self._sums[name] + total
        earlier = self._extremes
        self._extremes = extremes if earlier is None else torch.maximum(extremes, earlier)


def _histogram(log_ratio: Tensor) -> Tensor:  # [NUM_BINS] float64
    """Values outside of the range count in the outermost bins; NaN, as in the loss, counts as 0."""
    bounded = log_ratio.float().nan_to_num().clamp(-LOG_RANGE, LOG_RANGE)
    return torch.histc(bounded, NUM_BINS, min=-LOG_RANGE, max=LOG_RANGE).double()


def _quantiles(histogram: Tensor) -> dict[str, Tensor]:
    below = histogram.cumsum(0)
    width = 2 * LOG_RANGE / NUM_BINS
    return {
        name: (((below < share * below[-1]).sum() - NUM_BINS // 2) * width).double().exp()
        for name, share in QUANTILES.items()
    }


def replayed_share(batches: Sequence[Batch]) -> float:
    """Share of the computed rows whose expert routes are replayed from the engine."""
    parts = [part for batch in batches for part in batch.microbatches]
    routes = [part.routes[:, 0, 0] for part in parts if part.routes is not None]
    known = sum(int((first != unknown_id(first.dtype)).sum()) for first in routes)
    return known / sum(len(part.tokens) for part in parts)
