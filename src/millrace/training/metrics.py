"""Metrics of one step, accumulated over its microbatches.

Promise: every mean is over the trained tokens of the whole step, so no number depends on how it was
split. Sums stay on the device, in float64, until the step is over: one wait per step. Then the sums
of all ranks are added, so the metrics are those of the whole step, however many ranks share it. The
numbers of single tokens of a few rollouts (Microbatch.reported) leave the device with the sums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from millrace.core.completions import unknown_id
from millrace.core.microbatch import Batch, Microbatch
from millrace.training.losses.loss import RATIO, SAMPLE_SIZE, TokenBatch

# Histogram of log ratios for quantiles: they are right to 1 %. A ratio of 1 is the middle of a bin,
# so the quantiles of on-policy tokens are exactly 1.
LOG_RANGE = 2.0
NUM_BINS = 401
QUANTILES = {"ratio/p01": 0.01, "ratio/p99": 0.99}


_EXACT = {
    "mismatch/differing_logprobs": "_differing",
    "mismatch/compared_logprobs": "_compared",
    "mismatch/mixed_context_tokens": "_mixed",
}


class StepMetrics:
    """Sums of one step or one microbatch. Used by the trainer's thread."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # numbers, a histogram [NUM_BINS] and loads
        self._extremes: Tensor | None = None  # [2] float64; the largest ratio, minus the smallest
        self._num_tokens = 0
        self._num_microbatches = 0
        # Numbers of rollouts [n], and for their tokens the rows of HostSums.reported [3, n].
        self._reported: list[tuple[np.ndarray, Tensor]] = []

    @torch.no_grad()
    def add(
        self,
        tokens: TokenBatch,
        *,
        loss: Tensor,
        named: Mapping[str, Tensor],
        expert_load: Tensor | None = None,
    ) -> None:
        """Add a microbatch; `named` are per-token metrics of the loss. `expert_load` [layers,
        experts]: how many of its tokens each expert computed, in a mixture of experts."""
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
        if expert_load is not None:
            sums["_expert_load"] = expert_load
        self._accumulate(sums, torch.stack([ratio.max(), -ratio.min()]))
        self._num_tokens += len(ratio)
        self._num_microbatches += 1

    @torch.no_grad()
    def compare_bits(self, tokens: TokenBatch, is_mixed: np.ndarray | None) -> None:
        """Count on-policy logprobs that are not the engine's, bit for bit. Tokens where `is_mixed`
        [N] is True cannot be compared: see mixed_context()."""
        on_policy = tokens.staleness == 0
        mixed = torch.zeros_like(on_policy)
        if is_mixed is not None:
            mixed = torch.from_numpy(is_mixed).to(on_policy.device) & on_policy
        logprobs = (tokens.trainer_logprobs.detach(), tokens.engine_logprobs)
        ours, theirs = (values.contiguous().view(torch.int32) for values in logprobs)
        compared = on_policy & ~mixed
        counts = {"differing": (ours != theirs) & compared, "compared": compared, "mixed": mixed}
        for name, chosen in counts.items():
            total = self._sums.get(f"_{name}", 0)
            self._sums[f"_{name}"] = total + chosen.sum(dtype=torch.float64)

    @torch.no_grad()
    def report(self, tokens: TokenBatch, reported: np.ndarray | None) -> None:
        """Add the numbers of single tokens of a microbatch; `reported` is its field."""
        if reported is not None:
            columns = torch.stack([tokens.trainer_logprobs, tokens.entropies, tokens.advantages])
            chosen = torch.from_numpy(np.flatnonzero(reported >= 0)).to(columns.device)
            self._reported.append((reported[reported >= 0], columns.index_select(1, chosen)))

    def extend(self, other: "StepMetrics") -> None:
        if other._extremes is not None:
            self._accumulate(other._sums, other._extremes)
            self._num_tokens += other._num_tokens
            self._num_microbatches += other._num_microbatches
            self._reported += other._reported

    @property
    def loss(self) -> Tensor:
        return self._sums["_loss"]

    def ratio_sums(self) -> list[float]:
        """Number of the loss's ratios, their sum and that of their squares."""
        if RATIO not in self._sums:  # no microbatch with trained tokens
            return [0.0, 0.0, 0.0]
        return torch.stack([self._sums[name] for name in SAMPLE_SIZE]).tolist()

    def on_host(self) -> "HostSums":
        """Waits for the device once."""
        if self._extremes is None:
            return HostSums()
        columns = [*self._sums.values(), self._extremes, *(own for _, own in self._reported)]
        values = torch.cat([column.double().flatten() for column in columns]).cpu().numpy()
        parts = np.split(values, np.cumsum([column.numel() for column in columns])[:-1])
        sums, (extremes, *of_tokens) = parts[: len(self._sums)], parts[len(self._sums) :]
        reported: dict[int, np.ndarray] = {}
        for (numbers, _), part in zip(self._reported, of_tokens, strict=True):
            for number in np.unique(numbers).tolist():  # a later epoch has it, too
                own = part.reshape(3, -1)[:, numbers == number].astype(np.float32)
                reported.setdefault(number, own)
        return HostSums(
            sums={
                name: values.reshape(own.shape or 1)
                for (name, own), values in zip(self._sums.items(), sums, strict=True)
            },
            extremes=extremes,
            num_tokens=self._num_tokens,
            num_microbatches=self._num_microbatches,
            reported=reported,
        )

    def _accumulate(self, sums: Mapping[str, Tensor], extremes: Tensor) -> None:
        for name, total in sums.items():
            self._sums[name] = total if name not in self._sums else self._sums[name] + total
        earlier = self._extremes
        self._extremes = extremes if earlier is None else torch.maximum(extremes, earlier)


def _histogram(log_ratio: Tensor) -> Tensor:  # [NUM_BINS] float64
    """Values outside of the range count in the outermost bins; NaN, as in the loss, counts as 0."""
    bounded = log_ratio.float().nan_to_num().clamp(-LOG_RANGE, LOG_RANGE)
    return torch.histc(bounded, NUM_BINS, min=-LOG_RANGE, max=LOG_RANGE).double()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostSums:
    """The sums of one rank's step."""

    sums: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])  # float64
    extremes: np.ndarray = field(default_factory=lambda: np.full(2, -np.inf))
    num_tokens: int = 0
    num_microbatches: int = 0
    # By rollout: logprobs, entropies and advantages of its trained tokens, in their first update.
    reported: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])  # [3, n] float32


def expert_load(ranks: Sequence[HostSums]) -> np.ndarray:  # [layers, experts]
    """How many trained tokens of all ranks each expert computed; routes are replayed."""
    return np.sum([rank.sums["_expert_load"] for rank in ranks if rank.sums], axis=0)


def summarize(ranks: Sequence[HostSums]) -> dict[str, float]:
    """The metrics of a step by name, from the sums of all ranks; needs at least one microbatch."""
    of_ranks = [rank.sums for rank in ranks if rank.sums]
    num_tokens = sum(rank.num_tokens for rank in ranks)
    with np.errstate(all="ignore"):  # metrics of a skipped update may be infinite
        sums = {name: np.sum([s[name] for s in of_ranks], axis=0) for name in of_ranks[0]}
        greatest, minus_least = np.max([rank.extremes for rank in ranks], axis=0)
        means = {n: float(s[0]) / num_tokens for n, s in sums.items() if not n.startswith("_")}
        squares = sums["_ratio_squares"] / num_tokens
        # As a share of the tokens: (sum r)^2 / (n sum r^2).
        effective_size = np.square(means["ratio/mean"]) / squares
    return {
        **means,
        "loss": float(sums["_loss"][0]),
        "ratio/max": float(greatest),
        "ratio/min": -float(minus_least),
        "ratio/effective_sample_size": float(effective_size[0]),
        **_quantiles(sums["_histogram"]),
        **{name: float(sums[own][0]) for name, own in _EXACT.items() if own in sums},
        **(_balance(sums["_expert_load"]) if "_expert_load" in sums else {}),
        "batch/trained_tokens": float(num_tokens),
        "batch/microbatches": float(sum(rank.num_microbatches for rank in ranks)),
    }


def _quantiles(histogram: np.ndarray) -> dict[str, float]:
    below = histogram.cumsum()
    width = 2 * LOG_RANGE / NUM_BINS
    return {
        name: math.exp((int((below < share * below[-1]).sum()) - NUM_BINS // 2) * width)
        for name, share in QUANTILES.items()
    }


def _balance(load: np.ndarray) -> dict[str, float]:
    """How evenly tokens are spread: means over the layers of `load` [layers, experts]."""
    shares = load / load.sum(1, keepdims=True)
    num_experts = load.shape[1]
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(1)
    return {
        "moe/load_max": float(shares.max(1).mean()) * num_experts,
        "moe/load_entropy": float(entropies.mean()) / math.log(num_experts),
    }


def mixed_context(part: Microbatch) -> np.ndarray:  # [N] bool
    """Tokens whose context may be of several versions, which no trainer can reproduce: an earlier
    token of the same rollout was sampled by another one, and engines keep KV (kv = "keep"). If
    expert routes are replayed, any token of its tree: routes that several versions recorded."""
    if part.routes is None:
        first = np.searchsorted(part.rollouts, part.rollouts)
        return part.versions != part.versions[first]
    roots = np.arange(len(part.parents))
    for segment in np.flatnonzero(part.parents >= 0):
        roots[segment] = roots[part.parents[segment]]
    trees = np.repeat(roots, part.lengths)[part.predictors]
    any_version = np.zeros(len(roots), part.versions.dtype)
    any_version[trees] = part.versions
    return np.isin(trees, trees[part.versions != any_version[trees]])


def replayed_rows(batches: Sequence[Batch]) -> tuple[int, int]:
    """Number of computed rows whose expert routes are replayed from the engine, and of all."""
    parts = [part for batch in batches for part in batch.microbatches if len(part.targets)]
    routes = [part.routes[:, 0, 0] for part in parts if part.routes is not None]
    known = sum(int((first != unknown_id(first.dtype)).sum()) for first in routes)
    return known, sum(len(part.tokens) for part in parts)
