"""Selection of the episodes to train, if rollout.oversample generates more than needed.

A selection is a plug-in: a frozen dataclass whose fields are the keys of [rollout.selection], or a
user's function with the same signature.

Promise: whatever it returns, a group gets exactly `keep` different episodes, or one ScoreError. Its
random generator depends only on the run's seed and the group.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.core.errors import ScoreError, user_code
from millrace.core.plugins import build_callable, plugin
from millrace.core.protocols import Selection
from millrace.core.records import Group

SECTION = "rollout.selection"


@plugin
class FirstSelection:
    """The first episodes in the order of their requests, which is independent of their scores."""

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> list[int]:
        return list(range(keep))


@plugin
class RocSelection:
    """Resample on correct (GRPO-RoC): random failures, so that they stay diverse, and the cleanest
    successes. Both keep their share of the group, but at least one episode each if there is one.
    Successes are sorted: those not cut by length first, then by `quality`, then the shortest."""

    solved_at: float = 1.0
    """Minimum score of a success."""
    quality: str | None = None
    """Name of the score part that measures how clean an episode is; higher is better."""

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> list[int]:
        solved = [score.is_solved(self.solved_at) for score in group.scores]
        successes = [index for index, is_solved in enumerate(solved) if is_solved]
        failures = [index for index, is_solved in enumerate(solved) if not is_solved]
        num_failures = _share(len(failures), len(solved), keep=keep)
        kept = rng.permutation(failures)[:num_failures].tolist()
        successes.sort(key=lambda index: self._flaws(group, index))
        return sorted([*map(int, kept), *successes[: keep - num_failures]])

    def _flaws(self, group: Group, index: int) -> tuple[bool, float, int]:
        episode, score = group.episodes[index], group.scores[index]
        quality = 0.0
        if self.quality is not None:
            if self.quality not in score.parts:
                raise ScoreError(
                    f"{SECTION}.quality = {self.quality!r} is not a part of the score; name one of"
                    f" {', '.join(score.parts)}."
                )
            quality = score.parts[self.quality] or 0.0
        length = sum(rollout.num_sampled for rollout in episode.rollouts)
        return episode.turns[-1].finish == "length", -quality, length


ROC = "roc"
SELECTIONS: dict[str, type] = {ROC: RocSelection, "first": FirstSelection}


def build_selection(table: Mapping[str, Any]) -> Selection:
    return build_callable(
        table, builtins=SELECTIONS, default=ROC, section=SECTION, keywords=("keep", "rng")
    )


def select(group: Group, selection: Selection, *, keep: int, seed: int) -> Group:
    rng = np.random.default_rng((seed % 2**64, group.number))
    with user_code(f"Selection (group {group.number})"):
        chosen = [int(index) for index in selection(group, keep=keep, rng=rng)]
    valid = set(chosen).intersection(range(len(group.episodes)))
    if not len(chosen) == len(valid) == keep:
        raise ScoreError(
            f"Selection returned {chosen} for group {group.number}; return {keep} different indices"
            f" of its {len(group.episodes)} episodes."
        )
    return replace(
        group,
        episodes=tuple(group.episodes[index] for index in chosen),
        scores=tuple(group.scores[index] for index in chosen),
    )


def _share(part: int, whole: int, *, keep: int) -> int:
    """Return how many of `keep` episodes come from `part` of the `whole`; at least 1 of each."""
    fair = (2 * keep * part + whole) // (2 * whole)  # rounded half up
    other = whole - part
    fewest = max(keep - other, min(part, 1))
    most = min(part, keep - min(other, 1))
    return min(max(fair, fewest), most)
