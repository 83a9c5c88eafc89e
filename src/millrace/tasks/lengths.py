"""How long the episodes of a task will be, by those that were played: the longest are let begin
first, so that fewer are waited for at the end.

A request may overtake others in an engine's line, but only so many: none waits for ever. The order
in which tokens are drawn does not change what is drawn. Called from the controller's event loop.
"""

import bisect
import json
from hashlib import blake2b

import numpy as np

from millrace.core.records import Group, Task


class Lengths:
    def __init__(self, *, most: int) -> None:
        """`most`: others that a request of the longest task overtakes; 0 = none ever does."""
        self._most = most
        self._means: dict[bytes, float] = {}  # tokens of an episode, by task
        self._sorted: list[float] = []

    def overtakes(self, task: Task) -> int:
        """How many others; by the share of known tasks that are shorter, and half as many as the
        longest if nothing is known of this one."""
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
            mean = (known + mean) / 2  # the policy changes: what is recent counts more
        self._means[key] = mean
        bisect.insort(self._sorted, mean)


def _key(task: Task) -> bytes:
    prompt = json.dumps(task.prompt, sort_keys=True, default=repr)
    return blake2b(prompt.encode(), digest_size=16).digest()
