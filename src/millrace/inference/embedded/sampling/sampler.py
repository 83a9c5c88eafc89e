"""Draws the next token of each sequence, with its logprob and the ids that truncation kept.

Temperature first, then top-k, top-p and min-p, each on what is left; then one draw by inverse CDF
in the order of token ids. Rows of a batch may differ in every setting.

N = rows, V = vocabulary, K = kept ids of all rows together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.inference.embedded.sampling.random import uniforms
from millrace.models.logprobs import KeptRows, token_logprobs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawRows:
    """How to draw each row."""

    temperatures: Tensor  # [N] float32; 0 = greedy
    top_k: Tensor  # [N] int64; 0 = off
    top_p: Tensor  # [N] float32; 1 = off
    min_p: Tensor  # [N] float32; 0 = off
    keys: Tensor  # [N] int64; random stream of each row's completion
    positions: Tensor  # [N] int64; index of the token to draw in its completion

    def first(self, num_rows: int) -> "DrawRows":
        return DrawRows(
            temperatures=self.temperatures[:num_rows],
            top_k=self.top_k[:num_rows],
            top_p=self.top_p[:num_rows],
            min_p=self.min_p[:num_rows],
            keys=self.keys[:num_rows],
            positions=self.positions[:num_rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingRows(DrawRows):
    """With what is known about them on the host, to spare work nobody asked for."""

    any_greedy: bool
    all_greedy: bool
    any_truncates: bool
    num_ordered: int  # how many of its largest logits top-k and top-p must see of a row, at most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    tokens: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32; of greedy tokens, at temperature 1
    kept: KeptRows | None  # rows = N; None if nothing truncates


def sample(logits: Tensor, rows: SamplingRows) -> Drawn:
    """One token for each row of logits [N, V] float32."""
    if rows.all_greedy:
        tokens, temperatures = logits.argmax(-1), torch.ones_like(rows.temperatures)
        logprobs, _ = token_logprobs(logits, tokens, temperatures=temperatures, kept=None)
        return Drawn(tokens=tokens, logprobs=logprobs, kept=None)
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
    return Drawn(tokens=tokens, logprobs=logprobs, kept=kept)


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


def _allowed(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """[N, V] bool; True where truncation leaves the token. Ties with the last kept one are kept."""
    smallest = scaled.amax(-1) + rows.min_p.log()  # [N]; -inf where min-p is off
    if rows.num_ordered > 0:
        smallest = torch.maximum(smallest, _smallest_in_top(scaled, rows))
    return scaled >= smallest[:, None]


def _smallest_in_top(scaled: Tensor, rows: SamplingRows) -> Tensor:
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
