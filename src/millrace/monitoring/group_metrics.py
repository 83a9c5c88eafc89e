"""Metrics of the groups that one step trained on: rewards, episodes and staleness."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.records import Group
from millrace.core.staleness import Stamps


def group_metrics(
    groups: Sequence[Group], *, fresh: Sequence[Group], version: int
) -> dict[str, Any]:
    """Tables by metric. `fresh` are the groups that were not trained on before; only these count
    as results. `version` is the trainer's before the step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_generated for rollout in rollouts]
    return {
        **_reward_metrics(fresh),
        **_episode_metrics(fresh),
        **_staleness_metrics(groups, version=version),
        "completion_length": {"mean": float(np.mean(lengths)), "max": max(lengths)},
        **_teacher_metrics(groups),
    }


def _reward_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    scores = [score for group in groups for score in group.scores]
    totals = np.array([score.total for score in scores])
    parts: dict[str, list[float]] = {}  # a gate or the scorer itself may leave episodes out
    for score in scores:
        for name, part in score.parts.items():
            parts.setdefault(name, []).extend([] if part is None else [part])
    by_source: dict[str, list[float]] = {}
    for group in groups:
        if group.task.source:
            by_source.setdefault(group.task.source, []).extend(s.total for s in group.scores)
    return {
        "reward": {
            "mean": float(totals.mean()),
            "std": float(totals.std()),
            "source": {name: float(np.mean(own)) for name, own in by_source.items()},
        },
        "rewards": {
            name: {
                **({"mean": float(np.mean(values))} if values else {}),
                **({"share": len(values) / len(scores)} if len(values) < len(scores) else {}),
            }
            for name, values in parts.items()
        },
    }


def _episode_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    endings = Counter(episode.ending for episode in episodes)
    return {
        "turns": {"mean": float(np.mean([len(episode.turns) for episode in episodes]))},
        "episode": {**counts, "cut": {e: n for e, n in endings.items() if e != "done"}},
    }


def _staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, Any]:
    """Over the trained tokens. A spread is the newest version minus the oldest."""
    by_group = [[Stamps.of_rollout(rollout) for rollout in group.rollouts] for group in groups]
    wholes = [Stamps.joined(stamps) for stamps in by_group]
    tokens = Stamps.joined(wholes)
    assert tokens.oldest is not None, "a step trains at least one token"
    in_rollouts = [stamps.spread for of_group in by_group for stamps in of_group]
    in_groups = [stamps.spread for stamps in wholes]
    return {
        "staleness": {
            "mean": tokens.total_staleness(version) / tokens.num_tokens,
            "max": version - tokens.oldest,
            "share": {
                version - sampled_by: count / tokens.num_tokens
                for sampled_by, count in reversed(tokens.counts.items())
            },
        },
        "version_spread": {
            "rollout_mean": float(np.mean(in_rollouts)),
            "rollout_max": max(in_rollouts),
            "group_mean": float(np.mean(in_groups)),
            "group_max": max(in_groups),
        },
    }


def _teacher_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """The mean policy version of a teacher that is an earlier policy."""
    teachers = [r.teacher for group in groups for r in group.rollouts if r.teacher is not None]
    versions = [teacher.version for teacher in teachers if teacher.version is not None]
    return {"teacher": {"version": float(np.mean(versions))}} if versions else {}
