"""Samples the next token of each row, with its logprob and the ids that truncation kept.

Temperature applies first, then top-k, top-p and min-p, each to what the rule before it left; then
one draw by inverse CDF in the order of token ids. The rows of a batch may differ in every setting.
On CUDA, decode/kernels/sampling_kernels.py does the same; sample() is its reference.

N = rows, V = vocabulary.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.models.kept_rows import KeptRows, packed, unpacked
from millrace.models.logprobs import token_logprobs

KEPT_CAPACITY = 4096  # kept ids of a row that are listed, by default; more become a bit mask
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive counters land far apart
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def stream_key(seed: int, index: int) -> int:
    """Key of the random stream of one completion, as a signed 64-bit integer."""
    key = _mix((seed + GOLDEN) & _MASK)
    return signed(_mix((key ^ ((index * GOLDEN) & _MASK)) & _MASK))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1) for keys [N] int64 and token positions [N] int64."""
    x = keys + (positions + 1) * signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * signed(FACTOR_1)
    x = (x ^ _shift(x, 27)) * signed(FACTOR_2)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).to(torch.float64) * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * FACTOR_2) & _MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How to draw each row. What the host knows saves work; the defaults are always right."""

    temperatures: Tensor  # [N] float32; 0 = greedy
    top_k: Tensor  # [N] int64; 0 = off
    top_p: Tensor  # [N] float32; 1 = off
    min_p: Tensor  # [N] float32; 0 = off
    keys: Tensor  # [N] int64; random stream of each row's completion
    positions: Tensor  # [N] int64; index of the token to draw in its completion
    any_greedy: bool = True
    all_greedy: bool = False
    any_truncates: bool = True
    num_ordered: int | None = None  # largest logits per row that top-k and top-p need; None = all

    @classmethod
    def of(
        cls, integers: Tensor, floats: Tensor, *, positions: Tensor, **known: Any
    ) -> "SamplingBatch":
        """A batch of the columns of BatchSlots.integers and BatchSlots.floats."""
        _, keys, top_k, _ = integers
        temperatures, top_p, min_p = floats
        return cls(temperatures, top_k, top_p, min_p, keys, positions, **known)

    def first(self, num_rows: int, *, truncates: bool) -> "SamplingBatch":
        names = ("temperatures", "top_k", "top_p", "min_p", "keys", "positions")
        rows = {name: getattr(self, name)[:num_rows] for name in names}
        return replace(self, **rows, any_truncates=truncates)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerOutput:
    tokens: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32; of greedy tokens, at temperature 1
    kept: KeptRows | None  # rows = N; None if no row truncates
    top: tuple[Tensor, Tensor] | None = None  # [N, K] likeliest ids, logprobs; if some report them


class StepSample(NamedTuple):
    """The same in fixed shapes, which a CUDA graph needs."""

    tokens: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32
    kept: Tensor | None  # [N, capacity] int32; rows as in Kept
    num_kept: Tensor | None  # [N] int32; numbers of the row; 0 = no id was ruled out

    def first(self, num_rows: int) -> "StepSample":
        tokens, logprobs, *kept = (None if rows is None else rows[:num_rows] for rows in self)
        assert tokens is not None
        assert logprobs is not None
        return StepSample(tokens, logprobs, *kept)


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits [N, V] with -inf for the ids that are 0 in masks [N, V / 32] int32."""
    return torch.where(unpacked(masks, logits.shape[1]), logits, -torch.inf)


def sample_batch(logits: Tensor, rows: SamplingBatch, *, exact: bool = False) -> SamplerOutput:
    """One token for each row of logits [N, V] float32, by the kernels unless `exact`."""
    if not logits.is_cuda or exact:
        return sample(logits, rows)
    drawn = sample_step(logits.contiguous(), rows)
    if drawn.kept is None or drawn.num_kept is None:
        return SamplerOutput(tokens=drawn.tokens, logprobs=drawn.logprobs, kept=None)
    columns = torch.arange(drawn.kept.shape[1], device=logits.device)
    kept = KeptRows(
        ids=drawn.kept[columns < drawn.num_kept[:, None]].long(),
        offsets=F.pad(drawn.num_kept.cumsum(0), (1, 0)),
        has_masks=bool(((drawn.kept[:, 0] < 0) & (drawn.num_kept > 0)).any()),
    )
    return SamplerOutput(tokens=drawn.tokens, logprobs=drawn.logprobs, kept=kept)


def sample_step(logits: Tensor, rows: SamplingBatch, capacity: int = KEPT_CAPACITY) -> StepSample:
    """One token for each row of logits [N, V] float32. On CUDA it runs inside CUDA graphs."""
    capacity = row_capacity(capacity, vocab_size=logits.shape[1])
    if logits.is_cuda:
        from millrace.inference.embedded.decode.kernels import sampling_kernels

        drawn = sampling_kernels.sample(
            logits,
            temperatures=rows.temperatures,
            keys=rows.keys,
            indices=rows.positions,
            truncation=(rows.top_k, rows.top_p, rows.min_p) if rows.any_truncates else None,
            capacity=capacity,
        )
        return StepSample(*drawn)
    drawn = sample(logits, rows)
    kept = num_kept = None
    if drawn.kept is not None:
        kept = torch.zeros(len(logits), capacity, dtype=torch.int32)
        masks = packed(drawn.kept.allowed(logits.shape[1]))
        num_kept = drawn.kept.offsets.diff().int()
        for row, (start, stop) in enumerate(pairwise(drawn.kept.offsets.tolist())):
            ids = drawn.kept.ids[start:stop]
            if len(ids) > capacity:
                ids = torch.cat([-num_kept[row : row + 1], masks[row]])
            num_kept[row] = len(ids)
            kept[row, : len(ids)] = ids
    return StepSample(drawn.tokens, drawn.logprobs, kept, num_kept)


def with_exact_logprobs(drawn: StepSample, logits: Tensor, temperatures: Tensor) -> StepSample:
    """The logprobs that token_logprobs() computes in exact mode. Runs inside CUDA graphs."""
    scaled = logits / temperatures.masked_fill(temperatures == 0, 1.0)[:, None]
    allowed = allowed_ids(drawn, vocab_size=logits.shape[1])
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    logprobs = scaled.gather(-1, drawn.tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)
    return drawn._replace(logprobs=logprobs)


def allowed_ids(drawn: StepSample, *, vocab_size: int) -> Tensor | None:
    """[N, V] bool, the ids that truncation kept; None if no row truncates."""
    if drawn.kept is None or drawn.num_kept is None:
        return None
    columns = torch.arange(drawn.kept.shape[1], device=drawn.kept.device)
    is_mask = ((drawn.num_kept > 0) & (drawn.kept[:, 0] < 0))[:, None]
    is_listed = (columns < drawn.num_kept[:, None]) & ~is_mask
    ids = torch.where(is_listed, drawn.kept, drawn.tokens[:, None])
    allowed = (drawn.num_kept == 0)[:, None].repeat(1, vocab_size).scatter(1, ids, True)
    masks = unpacked(drawn.kept[:, 1 : 1 + -(-vocab_size // 32)], vocab_size)
    return torch.where(is_mask, masks, allowed)


def joined_rows(rows: Tensor, sizes: np.ndarray) -> np.ndarray:
    """The first `sizes` [R, N] numbers of rows [R, N, capacity] int32, in order, on the host."""
    if not rows.is_cuda:
        columns = torch.arange(rows.shape[2])
        return rows[columns < torch.from_numpy(sizes)[..., None]].numpy()
    from millrace.inference.embedded.decode.kernels.sampling_kernels import join_rows

    joined = join_rows(rows, torch.from_numpy(sizes).to(rows.device))
    # Pinned: wide rows are many bytes.
    return torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True).copy_(joined).numpy()


def row_capacity(capacity: int, *, vocab_size: int) -> int:
    """Room for a row of kept ids: for `capacity` ids, or for the bit mask of more."""
    return max(capacity, 1 + -(-vocab_size // 32))


def sample(logits: Tensor, rows: SamplingBatch) -> SamplerOutput:
    """One token for each row of logits [N, V] float32."""
    if rows.all_greedy:
        tokens, temperatures = logits.argmax(-1), torch.ones_like(rows.temperatures)
        logprobs, _ = token_logprobs(logits, tokens, temperatures=temperatures, kept=None)
        return SamplerOutput(tokens=tokens, logprobs=logprobs, kept=None)
    greedy = rows.temperatures == 0
    temperatures = rows.temperatures.masked_fill(greedy, 1.0)
    scaled = logits / temperatures[:, None]
    kept = None
    if rows.any_truncates:
        smallest = scaled.amax(-1) + rows.min_p.log()  # [N]; -inf where min-p is off
        if rows.num_ordered != 0:
            smallest = torch.maximum(smallest, _smallest_in_top(scaled, rows))
        # Ties with the last kept id are kept. Ids that a grammar rules out are -inf, and no
        # threshold may let them pass.
        is_kept = (scaled >= smallest[:, None]) & (scaled > -torch.inf)
        allowed = is_kept | greedy[:, None]  # [N, V]
        scaled = scaled.masked_fill(~allowed, -torch.inf)
        listed = allowed & ~allowed.all(-1, keepdim=True)  # a row that allows every id is empty
        offsets = F.pad(listed.sum(-1).cumsum(0), (1, 0))
        kept = KeptRows(ids=listed.nonzero()[:, 1], offsets=offsets)
    tokens = _draw(scaled.softmax(-1), uniforms(rows.keys, rows.positions))
    if rows.any_greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logprobs, _ = token_logprobs(logits, tokens, temperatures=temperatures, kept=kept)
    return SamplerOutput(tokens=tokens, logprobs=logprobs, kept=kept)


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [N] by inverse CDF of probabilities [N, V] at uniform [N] float64."""
    # Float64 keeps rounding of the sum from selecting an impossible token.
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below_total)
    # The first id whose CDF exceeds the target: its own probability is above 0.
    tokens = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
    return tokens.clamp_(max=cdf.shape[-1] - 1)  # beyond the end only if the logits were NaN


def _smallest_in_top(scaled: Tensor, rows: SamplingBatch) -> Tensor:
    """[N] the smallest logit that top-k, and then top-p, keep."""
    vocab_size = scaled.shape[-1]
    if rows.num_ordered is not None and rows.num_ordered < vocab_size:
        ordered = scaled.topk(rows.num_ordered, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab_size)
    inside = torch.arange(ordered.shape[-1], device=scaled.device) < top_k[:, None]
    probabilities = ordered.masked_fill(~inside, -torch.inf).softmax(-1)
    likelier = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    inside &= (likelier < rows.top_p[:, None]) | (rows.top_p >= 1.0)[:, None]
    # Both rules keep a prefix of the ordered row, so together they keep a prefix, too.
    last = inside.sum(-1, keepdim=True) - 1
    smallest = ordered.gather(-1, last).squeeze(-1)
    unlimited = (rows.top_k == 0) & (rows.top_p >= 1.0)
    return smallest.masked_fill(unlimited, -torch.inf)
