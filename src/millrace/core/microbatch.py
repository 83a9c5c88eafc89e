"""The trainer's input: the tokens of some rollouts laid end to end, shared beginnings once.

T = rows: one per token that is computed. S = segments: runs of rows that continue one another.
N = trained tokens, R = rollouts they belong to, K = tokens a teacher told of at each.

Rollouts of a group begin alike. What several of them share lies there once, as a segment, and what
follows it in each is a segment of its own with the shared one as its parent; a rollout that shares
nothing is one segment without a parent. A token that nothing trained comes after has no row.
"""

from dataclasses import dataclass, replace

import numpy as np

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatch:
    """One forward pass. A row sees the earlier rows of its segment and all rows of its parent.

    Parents come first and have no parents themselves; then their children, in the order of the
    parents; then segments that are neither. A trained token and the row that predicts it (what the
    model says there, it was drawn from) are listed once per rollout, so rows may serve several.
    """

    tokens: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32; from the start of the rollout, so that of a parent goes on
    lengths: np.ndarray  # [S] int32; sums to T
    parents: np.ndarray  # [S] int32; index of a segment, -1 = none
    predictors: np.ndarray  # [N] int32; row at which each trained token is predicted
    targets: np.ndarray  # [N] int32; the trained tokens
    rollouts: np.ndarray  # [N] int32; 0 .. R - 1 in ascending order
    engine_logprobs: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int32
    advantages: np.ndarray  # [N] float32
    temperatures: np.ndarray  # [N] float32; the temperature each token was sampled at
    kept: Kept | None = None  # rows = N
    routes: np.ndarray | None = None  # [T, layers, top_k] uint8 or uint16, see core/routes.py
    reference_logprobs: np.ndarray | None = None  # [N] float32; where the run has a reference model
    proximal_logprobs: np.ndarray | None = None  # [N] float32; the trainer's, set there, if at all
    # Where the run has teachers; NaN for tokens that none of them teaches:
    teacher_logprobs: np.ndarray | None = None  # [N] float32
    topk_ids: np.ndarray | None = None  # [N, K] int32; different ones at each token
    topk_logprobs: np.ndarray | None = None  # [N, K] float32; the teacher's, of these
    groups: np.ndarray | None = None  # [N] int32 ascending; where groups must not be split
    # Where the run has a critic:
    rewards: np.ndarray | None = None  # [N] float32; what each trained token earned
    last_rows: np.ndarray | None = None
    """[R] int32; row of the state after its last trained token, of a rollout that was cut there;
    -1 = it ended."""
    values: np.ndarray | None = None
    """[N] float32; what the critic expected before each trained token, set by it."""
    returns: np.ndarray | None = None  # [N] float32; what it should have expected, set with values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One optimizer update: its microbatches, and the totals that its loss is divided by.

    Losses divide by the totals of the whole batch, so the gradients of the ranks are summed.
    """

    microbatches: tuple[Microbatch, ...]  # equally many for each rank, those of rank 0 first
    num_sequences: int
    num_trained_tokens: int
    num_groups: int = 0
    num_ranks: int = 1

    def of_rank(self, rank: int) -> "Batch":
        """The microbatches of one rank, with the totals of the whole batch."""
        count = len(self.microbatches) // self.num_ranks
        share = self.microbatches[rank * count : (rank + 1) * count]
        return replace(self, microbatches=share, num_ranks=1)
