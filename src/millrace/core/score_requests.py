"""What a model in scoring mode is asked, and what it answers.

L = tokens of a passage, n = those it is asked about, K = likeliest tokens that are told of each.
"""

from dataclasses import dataclass

import numpy as np

from millrace.core.records import Kept, Rollout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """Tokens, and which of them a model shall judge, each given all before it."""

    tokens: np.ndarray  # [L] int32
    positions: np.ndarray  # [n] int32 ascending, n > 0; the first token of all cannot be judged
    temperature: float = 1.0
    top_k: int = 0  # K
    wants_entropies: bool = False
    kept: Kept | None = None  # rows = n; what the distribution is restricted to

    @property
    def read(self) -> np.ndarray:
        """[rows] int32; what has to be read for it: nothing behind the last judged token's
        predecessor."""
        return self.tokens[: int(self.positions[-1])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLogprobs:
    """What one version of a model says about a passage."""

    logprobs: np.ndarray  # [n] float32; of the tokens asked about
    top_ids: np.ndarray  # [n, K] int32; the likeliest first
    top_logprobs: np.ndarray  # [n, K] float32
    version: int | None  # None = of a model that never changes
    entropies: np.ndarray | None = None  # [n] float32, in nats; of what each token was one of


def passage_of(
    rollout: Rollout,
    *,
    temperature: float,
    top_k: int = 0,
    wants_entropies: bool = False,
    kept: Kept | None = None,
    instead_of_prompt: np.ndarray | None = None,
) -> ScoreRequest:
    """About all sampled tokens of a rollout; perhaps after another prompt than theirs."""
    sampled = np.flatnonzero(rollout.mask)
    tokens, shift = rollout.tokens, 0
    if instead_of_prompt is not None:
        num_prompt = int(sampled[0])
        tokens = np.concatenate([instead_of_prompt, tokens[num_prompt:]])
        shift = len(instead_of_prompt) - num_prompt
    if kept is not None:  # rows that were not sampled are empty
        sizes = np.diff(kept.offsets)[sampled]
        kept = Kept(ids=kept.ids, offsets=np.concatenate([np.zeros(1, np.int64), sizes.cumsum()]))
    return ScoreRequest(
        tokens=tokens.astype(np.int32, copy=False),
        positions=(sampled + shift).astype(np.int32),
        temperature=temperature,
        top_k=top_k,
        wants_entropies=wants_entropies,
        kept=kept,
    )
