"""How a judge's reply is read: by a key of the JSON in it, or by a pattern.

A pattern is the user's and may backtrack for ever, so it is matched in the scorer processes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from millrace.cluster.messages import ScoreGroup
from millrace.core.errors import WorkerError
from millrace.scoring.workers import ScorerWorkers

MAX_CHARACTERS = 20_000  # the end of a reply, where the score is
MAX_OBJECTS = 100  # in which a key is looked for; a reply may be nothing but braces
MATCH_S = 5.0


def read_key(reply: str, key: str) -> Any:
    """What the last JSON object of the reply that has this key holds there; None if none has."""
    reply = reply[-MAX_CHARACTERS:]
    decoder = json.JSONDecoder()
    start = len(reply)
    for _ in range(MAX_OBJECTS):
        start = reply.rfind("{", 0, start)
        if start < 0:
            break
        try:
            found, _ = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            continue
        if key in found:
            return cast(dict[str, Any], found)[key]
    return None


@dataclass(frozen=True)
class PatternReader:
    """A reward function over replies: the number that the last match holds in its first group."""

    pattern: str

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        return [self._read(reply) for reply in completions]

    def _read(self, reply: str) -> float | None:
        matches = list(re.finditer(self.pattern, reply[-MAX_CHARACTERS:]))
        try:
            return float(matches[-1][1]) if matches else None
        except (TypeError, ValueError):  # a group that took no part, or holds no number
            return None


async def read_pattern(
    reply: str, *, function: str, workers: ScorerWorkers, priority: int
) -> float | None:
    """None also if it takes too long."""
    message = ScoreGroup(
        function=function, prompts=[""], completions=[reply], completion_ids=[[]], columns={}
    )
    try:
        scored = await workers.call(message, alone=True, timeout_s=MATCH_S, priority=priority)
    except (TimeoutError, WorkerError):
        return None
    return scored.rewards[0]
