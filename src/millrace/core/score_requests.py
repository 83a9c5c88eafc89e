"""Requests to score given tokens with a model, and the model's answer.

L = tokens of a request, n = positions to score, K = top tokens reported per position.
"""

from dataclasses import dataclass

import numpy as np

from millrace.core.records import Kept, Rollout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """Tokens, and the positions whose logprobs are wanted, each given all tokens before it."""

    tokens: np.ndarray  # [L] int32
    positions: np.ndarray  # [n] int32, ascending, n > 0; position 0 cannot be scored
    temperature: float = 1.0
    top_k: int = 0  # K
    wants_entropies: bool = False
    kept: Kept | None = None  # rows = n; ids that the distribution is restricted to

    @property
    def inputs(self) -> np.ndarray:
        """[rows] int32; the tokens that have to be computed: those before the last position."""
        return self.tokens[: int(self.positions[-1])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLogprobs:
    """Scores of one request, all from one version of a model."""

    logprobs: np.ndarray  # [n] float32; of the tokens at the requested positions
    top_ids: np.ndarray  # [n, K] int32; most likely first
    top_logprobs: np.ndarray  # [n, K] float32
    version: int | None  # None = the model never changes
    entropies: np.ndarray | None = None  # [n] float32, in nats; of each position's distribution


def score_request_for(
    rollout: Rollout,
    *,
    temperature: float,
    top_k: int = 0,
    wants_entropies: bool = False,
    kept: Kept | None = None,
    prompt_override: np.ndarray | None = None,
) -> ScoreRequest:
    """Score all sampled tokens of a rollout, after its own prompt or after `prompt_override`."""
    sampled = np.flatnonzero(rollout.mask)
    tokens, shift = rollout.tokens, 0
    if prompt_override is not None:
        num_prompt = int(sampled[0])
        tokens = np.concatenate([prompt_override, tokens[num_prompt:]])
        shift = len(prompt_override) - num_prompt
    if kept is not None:  # rows of tokens that were not sampled are empty
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
