"""Scores of a group -> one advantage per episode.

An estimator is a plug-in: a frozen dataclass whose fields are the keys of [scoring.advantages].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.core.records import Score


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantages:
    """Each total minus the group's mean, over the group's standard deviation.

    The deviation is the unbiased one (n - 1), as in the common GRPO implementations. A group whose
    totals are all equal teaches nothing: its advantages are exactly 0, whatever rounding would say.
    """

    normalize_std: bool = True
    """Divide by the deviation; false leaves the scale of the rewards, as Dr. GRPO does."""
    epsilon: float = 1e-4
    """Added to the deviation, so that a tiny one does not blow up noise."""

    def __post_init__(self) -> None:
        if not isinstance(self.normalize_std, bool):
            raise ValueError(f"normalize_std = {self.normalize_std!r} must be true or false")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon = {self.epsilon!r} must be a finite number, at least 0")

    def __call__(self, scores: Sequence[Score]) -> np.ndarray:  # [episodes] float32
        totals = np.array([score.total for score in scores], dtype=np.float64)
        if totals.max() == totals.min():
            return np.zeros(len(totals), dtype=np.float32)
        centred = totals - totals.mean()
        if self.normalize_std:
            centred /= totals.std(ddof=1) + self.epsilon
        return centred.astype(np.float32)


ADVANTAGES: dict[str, type] = {"group": GroupAdvantages}
