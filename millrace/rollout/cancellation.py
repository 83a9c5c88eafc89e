"""Groups that can no longer be trained within the staleness limit: what they were, and what giving
them up at once has saved.

A running group is trained by the next take at the earliest. Once the limit certainly rules it out
there, nothing it still does is of use. While it generates, that is certain only if one token
decides (StalenessLimit.one_token_decides); engines know the tokens of unfinished completions, an
Attempt those of finished ones. Once it is complete, the limit says it exactly.

Called from the controller's event loop only.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from millrace.core.records import Completion
from millrace.core.staleness import Stamps
from millrace.rollout.course import Course

WINDOW = 1024  # finished completions from whose lengths the saving is estimated


class Expired(Exception):
    """A group's tokens have become too old. No error: the group is tried again."""


class Attempt:
    """One try at a group: which one, and the tokens it has so far."""

    def __init__(self, number: int, *, tries: int = 0) -> None:
        self.number = number
        self.tries = tries  # before this one
        self.stamps = Stamps(counts={})  # of the completions below
        self.given_up = Stamps(counts={})  # of these, those in episodes that the group did without
        self.finished: list[int] = []  # lengths of completions that came to their end
        self.cut: list[int] = []  # and of those that did not
        self.course: Course | None = None  # what it was told, if that is written down

    @property
    def known(self) -> Stamps:
        """Of what is certainly part of it, once or twice: also of completions that go on."""
        given = [] if self.course is None else [self.course.given]
        return Stamps.joined([self.stamps, *given])

    def record(self, completions: Sequence[Completion], *, num_known: int = 0) -> None:
        """Raises Expired if one of them was ended for its age. `num_known`: of their tokens, those
        that were recorded with another completion."""
        for completion in completions:
            has_ended = completion.finish in ("stop", "length")
            (self.finished if has_ended else self.cut).append(len(completion.tokens))
            stamps = Stamps.of(completion.versions[num_known:])
            self.stamps = Stamps.joined([self.stamps, stamps])
        if any(completion.finish == "expire" for completion in completions):
            raise Expired(f"group {self.number}")


class Cancellations:
    """Counts attempts that were given up, and the tokens that did not have to be sampled any
    more."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.tokens_saved = 0.0  # estimated
        self._lengths: deque[int] = deque(maxlen=WINDOW)

    def learn(self, lengths: Iterable[int]) -> None:
        """Completions of these lengths came to their end."""
        self._lengths.extend(lengths)

    def count(self, reason: str, *, cut: Iterable[int] = ()) -> None:
        """`cut`: lengths of its completions that were not finished."""
        self.by_reason[reason] += 1
        self.tokens_saved += sum(self._expected_rest(length) for length in cut)

    def _expected_rest(self, length: int) -> float:
        """What a completion of so many tokens would still have got: the mean over recent ones that
        came to have more."""
        longer = [other - length for other in self._lengths if other > length]
        return float(np.mean(longer)) if longer else 0.0
