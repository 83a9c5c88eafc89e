"""The trainer's input: rollouts laid end to end, without padding.

T = tokens in the microbatch, S = sequences in it. The logprob of token t is predicted at t - 1;
the first token of a sequence is never trained, so t - 1 always lies in the same sequence.
"""

from dataclasses import dataclass

import numpy as np

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatch:
    """One forward pass. Sequences never attend to each other; positions restart in each."""

    tokens: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32; 0.. within each sequence
    lengths: np.ndarray  # [S] int32; sums to T
    mask: np.ndarray  # [T] bool; True = trained
    engine_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    advantages: np.ndarray  # [T] float32; the sequence's advantage at each of its trained tokens
    temperatures: np.ndarray  # [T] float32; the temperature each token was sampled at
    kept: Kept | None = None  # rows = T


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One optimizer step: its microbatches and the totals its loss is averaged over."""

    microbatches: tuple[Microbatch, ...]
    num_sequences: int
    num_trained_tokens: int
