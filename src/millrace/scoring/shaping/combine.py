"""Combines the results of all scorers of a group: total scores with their parts, and token scores
in the rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.core.errors import ScoreError
from millrace.core.protocols import Scorer, gives_scores
from millrace.core.records import Episode, Group, Rollout, Score, ScorerResult, TokenScores

ENVIRONMENT = "environment"  # name of the score part that an environment gives


def combine(
    group: Group, results: Sequence[Sequence[ScorerResult]], *, scorers: Sequence[Scorer]
) -> Group:
    """Return the group with scores, given one list of results per scorer. A score of None adds
    nothing. The reward of an environment is a part like any other."""
    scores: list[Score] = []
    episodes: list[Episode] = []
    for index, (episode, *own_results) in enumerate(zip(group.episodes, *results, strict=True)):
        pairs = list(zip(scorers, own_results, strict=True))
        weighted = [
            scorer.weight * result.score for scorer, result in pairs if result.score is not None
        ]
        rewards = _environment_rewards(episode)
        if not weighted and not rewards and not any(result.token_scores for _, result in pairs):
            names = ", ".join([*(scorer.name for scorer in scorers), "its environment"])
            raise ScoreError(
                f"No scorer applied to episode {index} of group {group.number}: all of {names}"
                " returned None; at least one must return a number."
            )
        shared = math.fsum(weighted)
        by_agent = {agent: reward + shared for agent, reward in rewards.items()}
        parts: dict[str, float | None] = {
            f"{ENVIRONMENT}.{agent}" if agent else ENVIRONMENT: reward
            for agent, reward in rewards.items()
        }
        parts |= {scorer.name: result.score for scorer, result in pairs if gives_scores(scorer)}
        scores.append(
            Score(
                total=float(np.mean([*by_agent.values()])) if rewards else shared,
                parts=parts,
                by_agent=by_agent if isinstance(episode.reward, dict) else {},
            )
        )
        for scorer, result in pairs:
            if result.token_scores:
                rollouts = zip(episode.rollouts, result.token_scores, strict=True)
                annotated = tuple(_annotated(r, scores, scorer) for r, scores in rollouts)
                episode = replace(episode, rollouts=annotated)
        episodes.append(episode)
    return replace(group, episodes=tuple(episodes), scores=tuple(scores))


def _environment_rewards(episode: Episode) -> dict[str, float]:
    """Return the rewards by agent; the key "" stands for all agents."""
    if episode.reward is None:
        return {}
    return episode.reward if isinstance(episode.reward, dict) else {"": episode.reward}


def _annotated(rollout: Rollout, scores: TokenScores, scorer: Scorer) -> Rollout:
    """Rewards of several scorers add up. Reference and teacher logprobs come from one scorer."""
    changes: dict[str, object] = {}
    if scores.rewards is not None:
        weighted = (scorer.weight * scores.rewards).astype(np.float32)
        changes["rewards"] = weighted if rollout.rewards is None else rollout.rewards + weighted
    for name in ("reference_logprobs", "teacher"):
        if (value := getattr(scores, name)) is None:
            continue
        if getattr(rollout, name) is not None:
            raise ScoreError(
                f"Scorer {scorer.name!r} returns {name}, but an earlier scorer returned it, too;"
                " keep one of the two."
            )
        changes[name] = value
    return replace(rollout, **changes)
