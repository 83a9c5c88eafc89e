"""Draws the next token of each sequence, with its logprob and the ids that truncation kept.

Temperature first, then top-k, top-p and min-p, each on what is left; then one draw by inverse CDF
in the order of token ids. Rows of a batch may differ in every setting.

N = rows, V = vocabulary, K = kept ids of all rows together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.models.logprobs import KeptRows, token_logprobs

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
    """Logical right shift: torch's own carries the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * FACTOR_2) & _MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingTensors:
    """How to draw each row."""

    temperatures: Tensor  # [N] float32; 0 = greedy
    top_k: Tensor  # [N] int64; 0 = off
    top_p: Tensor  # [N] float32; 1 = off
    min_p: Tensor  # [N] float32; 0 = off
    keys: Tensor  # [N] int64; random stream of each row's completion
    positions: Tensor  # [N] int64; index of the token to draw in its completion

    def first(self, num_rows: int) -> "SamplingTensors":
        return SamplingTensors(
            temperatures=self.temperatures[:num_rows],
            top_k=self.top_k[:num_rows],
            top_p=self.top_p[:num_rows],
            min_p=self.min_p[:num_rows],
            keys=self.keys[:num_rows],
            positions=self.positions[:num_rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingBatch(SamplingTensors):
    """With what is known about them on the host, to spare work nobody asked for."""

    any_greedy: bool
    all_greedy: bool
    any_truncates: bool
    num_ordered: int  # how many of its largest logits top-k and top-p must see of a row, at most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplerOutput:
    tokens: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32; of greedy tokens, at temperature 1
    kept: KeptRows | None  # rows = N; None if nothing truncates


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
        # What a grammar rules out is -inf, which no threshold may let pass.
        allowed = (_allowed(scaled, rows) & (scaled > -torch.inf)) | greedy[:, None]
        scaled = scaled.masked_fill(~allowed, -torch.inf)
        kept = _kept_rows(allowed)
    tokens = _draw(scaled.softmax(-1), uniforms(rows.keys, rows.positions))
    if rows.any_greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logprobs, _ = token_logprobs(logits, tokens, temperatures=temperatures, kept=kept)
    return SamplerOutput(tokens=tokens, logprobs=logprobs, kept=kept)


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [N] by inverse CDF of probabilities [N, V] at uniform [N] float64."""
    # In float64, so that a rounding step of the sum is never taken for an impossible token.
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below_total)
    # The first id whose CDF exceeds the target: its own probability is above 0.
    tokens = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
    return tokens.clamp_(max=cdf.shape[-1] - 1)  # beyond the end only if the logits were NaN


def _allowed(scaled: Tensor, rows: SamplingBatch) -> Tensor:
    """[N, V] bool; True where truncation leaves the token. Ties with the last kept one are kept."""
    smallest = scaled.amax(-1) + rows.min_p.log()  # [N]; -inf where min-p is off
    if rows.num_ordered > 0:
        smallest = torch.maximum(smallest, _smallest_in_top(scaled, rows))
    return scaled >= smallest[:, None]


def _smallest_in_top(scaled: Tensor, rows: SamplingBatch) -> Tensor:
    """[N] the smallest logit that top-k, and then top-p, leave."""
    vocab_size = scaled.shape[-1]
    if rows.num_ordered < vocab_size:
        ordered = scaled.topk(rows.num_ordered, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocab_size)
    inside = torch.arange(ordered.shape[-1], device=scaled.device) < top_k[:, None]
    probabilities = ordered.masked_fill(~inside, -torch.inf).softmax(-1)
    likelier = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    inside &= (likelier < rows.top_p[:, None]) | (rows.top_p >= 1.0)[:, None]
    # Both rules leave a prefix of the ordered row, so what is left is a prefix, too.
    last = inside.sum(-1, keepdim=True) - 1
    smallest = ordered.gather(-1, last).squeeze(-1)
    unlimited = (rows.top_k == 0) & (rows.top_p >= 1.0)
    return smallest.masked_fill(unlimited, -torch.inf)


def _kept_rows(allowed: Tensor) -> KeptRows:
    """CSR of the allowed ids; a row that allows everything is empty."""
    ruling = ~allowed.all(-1, keepdim=True)
    listed = allowed & ruling
    sizes = listed.sum(-1)
    return KeptRows(
        ids=listed.nonzero()[:, 1], offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    )
