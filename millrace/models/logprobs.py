"""The one token-logprob function: for engines when they sample, for the trainer when it learns.

Promise: both compute the same number: the logprob of a token in the distribution it was drawn from,
after temperature, restricted and renormalised to the ids that truncation kept. Logits are float32
from here on.

N = positions, V = vocabulary, D = hidden size, K = kept ids of all positions together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRows:
    """Kept ids as CSR: row i is ids[offsets[i]:offsets[i + 1]]; empty = nothing ruled out."""

    ids: Tensor  # [K] int64
    offsets: Tensor  # [N + 1] int64

    @classmethod
    def select(cls, kept: Kept, *, rows: np.ndarray, device: torch.device) -> "KeptRows":
        """The rows of a numpy record that `rows` ([N] int) names, in that order."""
        starts, ends = kept.offsets[rows], kept.offsets[rows + 1]
        sizes = ends - starts
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        shift = np.repeat(starts - offsets[:-1], sizes)
        ids = kept.ids[np.arange(len(shift)) + shift].astype(np.int64)
        return cls(
            ids=torch.from_numpy(ids).to(device), offsets=torch.from_numpy(offsets).to(device)
        )

    def split(self, chunk: int) -> list["KeptRows"]:
        """Pieces of at most `chunk` rows, in order."""
        num_rows = len(self.offsets) - 1
        starts = list(range(0, num_rows, chunk))
        bounds = self.offsets[
            torch.tensor([*starts, num_rows], device=self.offsets.device)
        ].tolist()
        return [
            KeptRows(
                ids=self.ids[bounds[i] : bounds[i + 1]],
                offsets=self.offsets[start : start + chunk + 1] - bounds[i],
            )
            for i, start in enumerate(starts)
        ]

    def allowed(self, vocab_size: int) -> Tensor:
        """[N, V] bool; True where a token could have been drawn."""
        sizes = self.offsets.diff()
        allowed = (sizes == 0)[:, None].repeat(1, vocab_size)
        rows = torch.repeat_interleave(
            torch.arange(len(sizes), device=sizes.device), sizes, output_size=len(self.ids)
        )
        allowed[rows, self.ids] = True
        return allowed


def final_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden [N, D] -> float32 logits [N, V]: the head, and what some models put behind it."""
    head = model.get_output_embeddings()
    assert head is not None, "load_model refuses models without a head"
    logits = head(hidden).float()
    # Which of these exist depends on the architecture; load_model checks that the outcome is right.
    config = model.config.get_text_config()
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperatures: Tensor, kept: KeptRows | None
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` [N] and entropies [N] of the distributions they were drawn from.

    logits [N, V] float32, temperatures [N] all above 0: greedy tokens have no distribution of their
    own, and whoever wants a logprob for them asks at temperature 1. Differentiable in the logits.
    """
    scaled = logits / temperatures[:, None]
    if kept is None:
        finite = scaled
    else:
        allowed = kept.allowed(logits.shape[-1])
        finite = scaled.masked_fill(~allowed, 0.0)
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    normalizer = scaled.logsumexp(-1)  # [N]
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - normalizer
    # H = log Z - E[z]; ruled-out ids have probability 0 and must not meet their -inf.
    probabilities = (scaled - normalizer[:, None]).exp()
    entropies = normalizer - (probabilities * finite).sum(-1)
    return logprobs, entropies


def chunked_token_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperatures: Tensor,
    kept: KeptRows | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """token_logprobs of final_logits of hidden [N, D]; logits of at most `chunk` positions exist.

    That holds in the backward pass too: logits are computed again there, chunk by chunk.
    """

    def of_chunk(
        hidden: Tensor, targets: Tensor, temperatures: Tensor, kept: KeptRows | None
    ) -> tuple[Tensor, Tensor]:
        logits = final_logits(model, hidden)
        return token_logprobs(logits, targets, temperatures=temperatures, kept=kept)

    if len(targets) <= chunk:
        return of_chunk(hidden, targets, temperatures, kept)
    parts = zip(
        hidden.split(chunk),
        targets.split(chunk),
        temperatures.split(chunk),
        kept.split(chunk) if kept is not None else [None] * -(-len(targets) // chunk),
        strict=True,
    )
    # The head draws no random numbers, so there is no generator state worth saving.
    outcomes = [
        checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts
    ]
    logprobs, entropies = zip(*outcomes, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
