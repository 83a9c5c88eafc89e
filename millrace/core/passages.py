"""What a model in scoring mode is asked, and what it answers.

L = tokens of a passage, n = those it is asked about, K = likeliest tokens that are told of each.
"""

from dataclasses import dataclass

import numpy as np

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passage:
    """Tokens, and which of them a model shall judge, each given all before it."""

    tokens: np.ndarray  # [L] int32
    positions: np.ndarray  # [n] int32 ascending, n > 0; the first token of all cannot be judged
    temperature: float = 1.0
    top_k: int = 0  # K
    kept: Kept | None = None  # rows = n; what the distribution is restricted to

    @property
    def read(self) -> np.ndarray:
        """[rows] int32; what has to be read for it: nothing behind the last judged token's
        predecessor."""
        return self.tokens[: int(self.positions[-1])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Likelihoods:
    """What one version of a model says about a passage."""

    logprobs: np.ndarray  # [n] float32; of the tokens asked about
    top_ids: np.ndarray  # [n, K] int32; the likeliest first
    top_logprobs: np.ndarray  # [n, K] float32
    version: int | None  # None = of a model that never changes
