"""What one step says about itself, gathered over its microbatches.

Promise: every mean is over the trained tokens of the whole step, so no number depends on how it was
split. Sums stay on the device, in float64, until the step is over: one wait per step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from millrace.core.completions import unknown_id
from millrace.core.microbatch import Batch
from millrace.training.losses.loss import TokenBatch

# Of the histogram that quantiles are read from: they are right to 1 %, and 1 is the middle of a
# bin, so that those of tokens on policy are 1.
LOG_RANGE = 2.0
NUM_BINS = 401
QUANTILES = {"ratio/p01": 0.01, "ratio/p99": 0.99}


class StepMetrics:
    """Used by one step, in the trainer's thread."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # each a number, but for the histogram [NUM_BINS]
        self._extremes: Tensor | None = None  # [2] float64; the largest ratio, minus the smallest
        self._num_tokens = 0
        self._num_microbatches = 0

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: Tensor, named: Mapping[str, Tensor]) -> None:
        """One microbatch; `named` are the loss's own per-token metrics."""
        log_ratio = tokens.trainer_logprobs.double() - tokens.engine_logprobs
        ratio = log_ratio.exp()
        per_token = {
            "entropy": tokens.entropies,
            "ratio/mean": ratio,
            # Tokens were drawn by the engine, so all three estimate KL(engine || trainer).
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
        self._gather(sums, torch.stack([ratio.max(), -ratio.min()]))
        self._num_tokens += len(ratio)
        self._num_microbatches += 1

    def extend(self, other: "StepMetrics") -> None:
        """What another part of the same step gathered; its loss is added to this one's."""
        assert other._extremes is not None, "add() comes before extend()"
        self._gather(other._sums, other._extremes)
        self._num_tokens += other._num_tokens
        self._num_microbatches += other._num_microbatches

    @property
    def loss(self) -> Tensor:
        return self._sums["_loss"]

    def summary(self) -> dict[str, float]:
        """Needs at least one microbatch."""
        assert self._extremes is not None, "add() comes before summary()"
        means = {n: s / self._num_tokens for n, s in self._sums.items() if not n.startswith("_")}
        squares = self._sums["_ratio_squares"] / self._num_tokens
        found = {
            **means,
            "loss": self.loss,
            "ratio/max": self._extremes[0],
            "ratio/min": -self._extremes[1],
            # Of this share of the tokens, on policy, a mean would be as noisy as of these.
            "ratio/effective_sample_size": means["ratio/mean"].square() / squares,
            **_quantiles(self._sums["_histogram"]),
        }
        values = torch.stack(list(found.values())).tolist()
        return {
            **dict(zip(found, values, strict=True)),
            "batch/trained_tokens": float(self._num_tokens),
            "batch/microbatches": float(self._num_microbatches),
        }

    def _gather(self, sums: Mapping[str, Tensor], extremes: Tensor) -> None:
        for name, total in sums.items():
            self._sums[name] = total if name not in self._sums else self._sums[name] + total
        earlier = self._extremes
        self._extremes = extremes if earlier is None else torch.maximum(extremes, earlier)


def _histogram(log_ratio: Tensor) -> Tensor:  # [NUM_BINS] float64
    """What lies outside is in the outermost bins. What is no number makes the loss none, too."""
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
    """Of the rows that are computed, those that are sent where the engine sent them."""
    parts = [part for batch in batches for part in batch.microbatches]
    known = sum(
        int((routes[:, 0, 0] != unknown_id(routes.dtype)).sum())
        for part in parts
        if (routes := part.routes) is not None
    )
    return known / sum(len(part.tokens) for part in parts)
