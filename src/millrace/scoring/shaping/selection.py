"""Which episodes of a group are trained, where rollout.oversample plays more than are needed.

A selection is a plug-in: a frozen dataclass whose fields are the keys of [rollout.selection], or a
function of the user's with the same signature.

Promise: whatever it returns, a group gets exactly as many different episodes as are to be kept, or
one ScoreError sentence. The generator it is given depends on the run's seed and the group alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.core.errors import ScoreError
from millrace.core.plugins import build_callable
from millrace.core.protocols import Selection
from millrace.core.records import Group

SECTION = "rollout.selection"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstSelection:
    """The first ones, in the order in which they were asked for: chance, as far as scores go."""

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> list[int]:
        return list(range(keep))


@dataclass(frozen=True, kw_only=True, slots=True)
class RocSelection:
    """Resample on correct (GRPO-RoC): failures at random, so that they stay diverse; of the
    successes the cleanest.

    Both keep their share of the group, but at least one episode each where there are any. Successes
    that were not cut by length come first, then by `quality`, then the shortest.
    """

    solved_at: float = 1.0
    """A score from here on is a success."""
    quality: str | None = None
    """Name of the score part that says how clean an episode is; more is better."""

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
                    f"{SECTION}.quality = {self.quality!r} is no part of a score; name one of"
                    f" {', '.join(score.parts)}."
                )
            quality = score.parts[self.quality] or 0.0
        length = sum(rollout.num_sampled for rollout in episode.rollouts)
        return episode.turns[-1].finish == "length", -quality, length


ROC = "roc"
SELECTIONS: dict[str, type] = {ROC: RocSelection, "first": FirstSelection}


def build_selection(table: Mapping[str, Any]) -> Selection:
    """What a [rollout.selection] table describes; a function is given the other keys with every
    call."""
    return build_callable(
        table, builtins=SELECTIONS, default=ROC, section=SECTION, keywords=("keep", "rng")
    )


def select(group: Group, selection: Selection, *, keep: int, seed: int) -> Group:
    """The scored group with `keep` of its episodes."""
    if len(group.episodes) <= keep:
        return group
    rng = np.random.default_rng((seed % 2**64, group.number))
    try:
        chosen = [int(index) for index in selection(group, keep=keep, rng=rng)]
    except ScoreError:
        raise
    except Exception as error:
        raise ScoreError(
            f"Selection raised {type(error).__name__}: {error} (group {group.number}); mend it."
        ) from error
    if len(set(chosen)) != keep or len(chosen) != keep or not _are_indices(chosen, group):
        raise ScoreError(
            f"Selection gave {chosen} for group {group.number}; it must name {keep} different ones"
            f" of its {len(group.episodes)} episodes."
        )
    return replace(
        group,
        episodes=tuple(group.episodes[index] for index in chosen),
        scores=tuple(group.scores[index] for index in chosen),
    )


def _share(part: int, whole: int, *, keep: int) -> int:
    """Of `keep` places those of `part` of the `whole`; neither side is left without any that it
    could have."""
    fair = (2 * keep * part + whole) // (2 * whole)  # rounded half up
    other = whole - part
    fewest = max(keep - other, min(part, 1))
    most = min(part, keep - min(other, 1))
    return min(max(fair, fewest), most)


def _are_indices(chosen: list[int], group: Group) -> bool:
    return all(0 <= index < len(group.episodes) for index in chosen)
