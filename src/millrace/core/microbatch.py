"""The trainer's input: rollouts packed end to end, with shared prefixes stored once.

T = rows, one per computed token. S = segments: contiguous rows. N = trained tokens, R = rollouts
they belong to, K = ids per token that a teacher gives logprobs for.

Rollouts of a group share their prompt, and branches of an episode share its turns. Shared rows are
stored once, so the segments of a group form trees: a segment continues its parent, and a rollout is
the path from a root to a segment, or its beginning. Tokens after the last trained one have no row.
"""

from dataclasses import dataclass, replace

import numpy as np

from millrace.core.records import DEFAULT_POLICY, Kept

# A shared prefix costs a second look at its keys in every layer; a shorter one is not worth it.
MIN_SHARED_TOKENS = 4


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def segment_order(parents: np.ndarray) -> np.ndarray:
    """The order of a Microbatch, for segments [S] whose trees are each in depth-first order."""
    kinds = np.where(parents >= 0, 1, 2)
    is_shared = np.zeros(len(parents), bool)
    is_shared[parents[parents >= 0]] = True
    kinds[is_shared & (parents < 0)] = 0
    return np.argsort(kinds, kind="stable")


class Segments:
    """The segments of a forward pass under construction; add them in the order of Microbatch."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.parents: list[int] = []
        self.paths: list[np.ndarray] = []  # rows of each segment and of those that it continues
        self._num_rows = 0

    def add(self, tokens: np.ndarray, *, parent: int = -1) -> int:
        """Add a segment that continues the segment `parent`, -1 = none; returns its number."""
        before = self.paths[parent] if parent >= 0 else np.empty(0, np.int64)
        own = np.arange(self._num_rows, self._num_rows + len(tokens))
        self.tokens.append(tokens)
        self.positions.append(np.arange(len(before), len(before) + len(tokens)))
        self.parents.append(parent)
        self.paths.append(np.concatenate([before, own]))
        self._num_rows += len(tokens)
        return len(self.parents) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Microbatch:
    """One forward pass. A row attends to the earlier rows of its segment and to all rows of the
    segments that this one continues.

    The roots of trees come first, then what is below each root in the same order, depth first, then
    segments that share nothing. A trained token and the row that predicts it are listed once per
    rollout, so one row may predict tokens of several rollouts.
    """

    tokens: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32; from the start of the rollout
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
    routes: np.ndarray | None = None  # [T, layers, top_k] uint8 or uint16
    scores: np.ndarray | None = None  # [N] float32; of the episode, if the loss needs it
    reference_logprobs: np.ndarray | None = None  # [N] float32; if the run has a reference
    proximal_logprobs: np.ndarray | None = None  # [N] float32; set by the trainer if needed
    # If the run has teachers; NaN for tokens without a teacher:
    teacher_logprobs: np.ndarray | None = None  # [N] float32
    topk_ids: np.ndarray | None = None  # [N, K] int32; distinct for each token
    topk_logprobs: np.ndarray | None = None  # [N, K] float32; the teacher's
    groups: np.ndarray | None = None  # [N] int32 ascending; if groups must not be split
    # [N] int32; number of the rollout whose tokens the trainer reports on, -1 = none; None = none.
    reported: np.ndarray | None = None
    # If the run has a critic:
    rewards: np.ndarray | None = None  # [N] float32; of each trained token
    last_rows: np.ndarray | None = None
    """[R] int32; row of the state after the last trained token of a truncated rollout; -1 = the
    episode ended."""
    values: np.ndarray | None = None
    """[N] float32; the critic's value of the state before each trained token, set by the critic."""
    returns: np.ndarray | None = None  # [N] float32; the critic's targets, set with values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One optimizer update: its microbatches, and the totals that its loss is divided by.

    Losses divide by the totals of the whole batch, so the gradients of the ranks are summed.
    """

    microbatches: tuple[Microbatch, ...]  # equally many for each rank, those of rank 0 first
    num_sequences: int
    num_trained_tokens: int
    num_groups: int = 0
    num_ranks: int = 1  # shares that it is divided into
    balance: float = 1.0  # mean cost of the ranks' shares, divided by the largest
    policy: str = DEFAULT_POLICY  # that learns from it, of several adapters of one trainer

    def of_rank(self, rank: int) -> "Batch":
        """The microbatches of one rank, with the totals of the whole batch."""
        count = len(self.microbatches) // self.num_ranks
        share = self.microbatches[rank * count : (rank + 1) * count]
        return replace(self, microbatches=share, num_ranks=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """How the ranks of a trainer share its work. Ranks count through the mesh with tp fastest, then
    cp, dp_shard and dp_replicate. Ranks that differ in tp or cp alone compute the same microbatches
    together; all others have microbatches of their own."""

    dp_replicate: int = 1  # copies of the sharded model
    dp_shard: int = 1  # ranks that FSDP shards weights, gradients and optimizer state over
    cp: int = 1  # ranks that share the rows of a microbatch; FSDP shards over them, too
    tp: int = 1  # ranks that share each matrix product
    ep: int = 1  # ranks that share the experts; divides dp_shard * cp

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Number of different shares of a batch."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """The share of a batch that a rank computes."""
        return rank // (self.cp * self.tp)
