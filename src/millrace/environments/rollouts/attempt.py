"""Attempts at groups: the versions of their tokens, and what cancelled attempts waste.

A group that is running now is trained by the next take at the earliest. It is cancelled as soon as
the staleness limit certainly rules it out there. While it generates, that is certain only if one
token decides (StalenessLimit.one_token_decides): engines know the tokens of unfinished completions,
an Attempt those of finished ones. Once the group is complete, the limit is exact.

Runs on the controller's event loop.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.core.completions import is_complete
from millrace.core.records import Completion
from millrace.core.spans import GroupLife, TurnLife
from millrace.core.staleness import Stamps

if TYPE_CHECKING:
    from millrace.environments.rollouts.partial_rollouts import PartialRollout

WINDOW = 1024  # finished completions from whose lengths the saving is estimated
Clock = Callable[[], float]


class Expired(Exception):
    """The tokens of a group have become too stale. Not an error: the group is tried again."""


class Attempt:
    """One attempt at a group, with the versions of its tokens so far."""

    def __init__(self, number: int, *, tries: int = 0, now: Clock = time.monotonic) -> None:
        self.number = number
        self.tries = tries  # before this one
        self.stamps = Stamps(counts={})  # of all completions that were returned
        self.given_up = Stamps(counts={})  # of these, those of episodes that the group left out
        self.finished: list[int] = []  # lengths of completions that the model ended
        self.cut: list[int] = []  # lengths of other completions
        self.partial: PartialRollout | None = None  # where partial rollouts are saved
        self.now = now
        self.life = GroupLife(number=number, tries=tries, started_s=now(), turns={})

    @property
    def known(self) -> Stamps:
        """All tokens that are certainly part of the group; resumed ones may count twice."""
        resumed = [] if self.partial is None else [self.partial.resumed]
        return Stamps.joined([self.stamps, *resumed])

    def add_turn(self, episode: int, start_s: float, versions: np.ndarray) -> None:
        """`versions` of its tokens."""
        first, last = (int(versions[0]), int(versions[-1])) if len(versions) else (-1, -1)
        turn = TurnLife(start_s, self.now(), len(versions), first, last)
        self.life.turns.setdefault(episode, []).append(turn)

    def ended(self, outcome: Any, reason: str = "") -> GroupLife:
        return replace(self.life, ended_s=self.now(), outcome=outcome, reason=reason)

    def record(self, completions: Sequence[Completion], *, num_known: int = 0) -> None:
        """Count the tokens; raises Expired if a completion was ended because it is too stale.
        `num_known`: leading tokens that were recorded with another completion."""
        for completion in completions:
            lengths = self.finished if is_complete(completion) else self.cut
            lengths.append(len(completion.tokens))
            stamps = Stamps.of(completion.versions[num_known:])
            self.stamps = Stamps.joined([self.stamps, stamps])
        if any(completion.finish == "expire" for completion in completions):
            raise Expired(f"group {self.number}")


class Cancellations:
    """Counts cancelled attempts, and estimates the tokens that need not be sampled any more."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.tokens_saved = 0.0  # estimated
        self._lengths: deque[int] = deque(maxlen=WINDOW)

    def learn(self, lengths: Iterable[int]) -> None:
        """Add the lengths of completions that the model ended."""
        self._lengths.extend(lengths)

    def count(self, reason: str, *, cut: Iterable[int] = ()) -> None:
        """`cut`: lengths of completions that were cut short."""
        self.by_reason[reason] += 1
        self.tokens_saved += sum(self._expected_rest(length) for length in cut)

    def _expected_rest(self, length: int) -> float:
        """Return the mean number of further tokens of recent completions that were longer."""
        longer = [other - length for other in self._lengths if other > length]
        return float(np.mean(longer)) if longer else 0.0
