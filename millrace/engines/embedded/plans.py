"""What the scheduler decided: one forward pass, or one round of them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """One forward pass. Each lane computes `counts` tokens, starting behind its cached ones."""

    lanes: np.ndarray  # [R] int64; first those with one token, shortest context first
    counts: np.ndarray  # [R] int64
    num_single: int  # lanes with one token
    copy_sources: np.ndarray  # [C] int64; blocks to copy before the pass ...
    copy_targets: np.ndarray  # [C] int64; ... into these


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundPlan:
    """Several steps of one token for each lane; blocks for all of them are there."""

    lanes: np.ndarray  # [R] int64
    num_steps: int
    copy_sources: np.ndarray  # as in a Plan
    copy_targets: np.ndarray
