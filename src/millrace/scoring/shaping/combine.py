"""What all scorers of a run said about a group, put together: totals with their parts, and what
was said about single tokens, in the rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from millrace.core.errors import ScoreError
from millrace.core.protocols import Scorer, gives_scores
from millrace.core.records import Episode, Group, Notes, Rollout, Score, Verdict

T = TypeVar("T")

ENVIRONMENT = "environment"  # the part of a score that an environment gave itself


def combine(
    group: Group, columns: Sequence[Sequence[Verdict]], *, scorers: Sequence[Scorer]
) -> Group:
    """The group with scores, given a column of verdicts per scorer; a score of None adds nothing.

    What an environment rewarded is a part of the score like any other."""
    scores: list[Score] = []
    episodes: list[Episode] = []
    for index, (episode, *verdicts) in enumerate(zip(group.episodes, *columns, strict=True)):
        weighted = [
            scorer.weight * verdict.score
            for scorer, verdict in zip(scorers, verdicts, strict=True)
            if verdict.score is not None
        ]
        own = _rewards(episode)
        names = [scorer.name for scorer in scorers]
        if not weighted and not own and not any(verdict.notes for verdict in verdicts):
            raise ScoreError(
                f"No scorer applied to episode {index} of group {group.number}: all of"
                f" {', '.join([*names, 'its environment'])} returned None; at least one must give a"
                " number."
            )
        parts = {
            scorer.name: verdict.score
            for scorer, verdict in zip(scorers, verdicts, strict=True)
            if gives_scores(scorer)
        }
        shared = math.fsum(weighted)
        by_agent = {name: reward + shared for name, reward in own.items()}
        scores.append(
            Score(
                total=float(np.mean([*by_agent.values()])) if own else shared,
                parts={**{_part(name): reward for name, reward in own.items()}, **parts},
                by_agent=by_agent if isinstance(episode.reward, dict) else {},
            )
        )
        episodes.append(_annotated(episode, verdicts, scorers=scorers))
    return replace(group, episodes=tuple(episodes), scores=tuple(scores))


def _rewards(episode: Episode) -> dict[str, float]:
    """By agent; "" stands for all of them."""
    if episode.reward is None:
        return {}
    return episode.reward if isinstance(episode.reward, dict) else {"": episode.reward}


def _part(agent: str) -> str:
    return f"{ENVIRONMENT}.{agent}" if agent else ENVIRONMENT


def _annotated(
    episode: Episode, verdicts: Sequence[Verdict], *, scorers: Sequence[Scorer]
) -> Episode:
    rollouts = list(episode.rollouts)
    for scorer, verdict in zip(scorers, verdicts, strict=True):
        if verdict.notes:
            noted = zip(rollouts, verdict.notes, strict=True)
            rollouts = [_with_notes(rollout, notes, scorer=scorer) for rollout, notes in noted]
    return replace(episode, rollouts=tuple(rollouts))


def _with_notes(rollout: Rollout, notes: Notes, *, scorer: Scorer) -> Rollout:
    """Rewards of several scorers add up; of anything else there can be one."""
    rewards = rollout.rewards
    if notes.rewards is not None:
        weighted = (scorer.weight * notes.rewards).astype(np.float32)
        rewards = weighted if rewards is None else rewards + weighted
    for name in ("reference_logprobs", "teaching"):
        if getattr(rollout, name) is not None and getattr(notes, name) is not None:
            raise ScoreError(f"Scorer {scorer.name!r} gives {name}, and one before it has, too.")
    return replace(
        rollout,
        rewards=rewards,
        reference_logprobs=_first(rollout.reference_logprobs, notes.reference_logprobs),
        teaching=_first(rollout.teaching, notes.teaching),
    )


def _first(one: T | None, other: T | None) -> T | None:
    return other if one is None else one
