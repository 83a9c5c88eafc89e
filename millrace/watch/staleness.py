"""How stale the tokens of a step are, and how far apart the versions that sampled them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.records import Group
from millrace.core.staleness import Stamps


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, Any]:
    """Of the trained tokens, for a trainer at `version`. A spread is the newest version minus the
    oldest."""
    by_group = [[Stamps.of_rollout(rollout) for rollout in group.rollouts] for group in groups]
    wholes = [Stamps.joined(stamps) for stamps in by_group]
    tokens = Stamps.joined(wholes)
    assert tokens.oldest is not None, "a step learns something"
    within = [stamps.spread for of_group in by_group for stamps in of_group]
    across = [stamps.spread for stamps in wholes]
    num_tokens = tokens.num_tokens
    return {
        "staleness_mean": tokens.total_staleness(version) / num_tokens,
        "staleness_max": version - tokens.oldest,
        "staleness_histogram": {
            str(version - sampled_by): count / num_tokens
            for sampled_by, count in reversed(tokens.counts.items())
        },
        "rollout_spread_mean": float(np.mean(within)),
        "rollout_spread_max": max(within),
        "group_spread_mean": float(np.mean(across)),
        "group_spread_max": max(across),
    }
