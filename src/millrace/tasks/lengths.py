"""Predicts episode lengths per task, so that long episodes start first.

Starting long episodes first leaves fewer stragglers. A request may skip only a bounded number of
queued requests, so none starves. Scheduling order does not change sampled tokens: each draw has its
own seed. Runs on the controller's event loop.
"""

import bisect
import json
from hashlib import blake2b

import numpy as np

from millrace.core.records import Group, Task


class LengthPredictor:
    def __init__(self, *, most: int) -> None:
        """`most`: queued requests that a request of the longest task may skip; 0 disables it."""
        self._most = most
        self._means: dict[bytes, float] = {}  # mean tokens per episode, by task
        self._sorted: list[float] = []

    def priority(self, task: Task) -> int:
        """Return how many queued requests this task's requests may skip. The number grows with the
        share of known tasks that are shorter; an unknown task gets half of the maximum."""
        mean = self._means.get(_key(task))
        if not self._most or not self._sorted:
            return 0
        if mean is None:
            return self._most // 2
        return self._most * bisect.bisect_left(self._sorted, mean) // len(self._sorted)

    def learn(self, group: Group) -> None:
        if not self._most:
            return
        key = _key(group.task)
        known = self._means.get(key)
        mean = float(np.mean([sum(r.num_sampled for r in e.rollouts) for e in group.episodes]))
        if known is not None:
            del self._sorted[bisect.bisect_left(self._sorted, known)]
            mean = (known + mean) / 2  # the policy changes, so recent episodes count more
        self._means[key] = mean
        bisect.insort(self._sorted, mean)


def _key(task: Task) -> bytes:
    prompt = json.dumps(task.prompt, sort_keys=True, default=repr)
    return blake2b(prompt.encode(), digest_size=16).digest()
