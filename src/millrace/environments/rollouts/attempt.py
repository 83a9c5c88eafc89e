"""Attempts at groups: their tokens so far, and the waste when an attempt is cancelled.

A group that is running now is trained by the next take at the earliest. It is cancelled as soon as
the staleness limit certainly rules it out there. While it generates, that is certain only if one
token decides (StalenessLimit.one_token_decides): engines know the tokens of unfinished completions,
an Attempt those of finished ones. Once the group is complete, the limit is exact.

Runs on the controller's event loop.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from millrace.core.completions import (
    StreamedTokens,
    TokenLog,
    is_complete,
    join_streamed,
    request_digest,
)
from millrace.core.records import Completion, Request
from millrace.core.staleness import Stamps

IsTrainable = Callable[[np.ndarray], bool]  # whether tokens of these versions [N] may be trained
WINDOW = 1024  # finished completions from whose lengths the saving is estimated


class Expired(Exception):
    """The tokens of a group have become too stale. Not an error: the group is tried again."""


class PartialRollout:
    """The tokens of one attempt at a group: saved before a crash, and new ones to be saved.

    Promise: saved tokens answer only the request that they were sampled for. Those that would break
    the staleness rule, or that no request asks for, are counted.
    """

    def __init__(
        self,
        saved: Iterable[StreamedTokens] = (),
        *,
        is_trainable: IsTrainable = lambda _: True,
    ) -> None:
        self.num_resumed = 0  # saved tokens that were used
        self.resumed = Stamps(counts={})  # of these, those that are trained
        self.stale = Stamps(counts={})  # saved tokens that are too stale to be used
        self._is_trainable = is_trainable
        self._saved = join_streamed(saved)
        self._new: list[StreamedTokens] = []

    @property
    def unused(self) -> Stamps:
        """Saved tokens that no request has asked for so far."""
        return Stamps.joined(Stamps.of(one.completion.versions) for one in self._saved.values())

    def log(self, request: Request, *, model: str | None = None) -> TokenLog:
        """The log of a request, which starts with the tokens that were saved for it. `model`: the
        model that answers, if it is not the policy."""
        digest = request_digest(request, model=model)
        known = [self._take_saved(request, member, digest) for member in range(request.n)]
        return TokenLog(request, known=known, digest=digest, save=self._new.append)

    def take_new(self) -> list[StreamedTokens]:
        """The tokens since the last call."""
        new = list(self._new)
        self._new.clear()
        return new

    def _take_saved(self, request: Request, member: int, digest: str) -> Completion | None:
        saved = self._saved.get((request.id, member))
        if saved is None or saved.digest != digest:
            return None
        del self._saved[request.id, member]
        completion = saved.completion
        stamps = Stamps.of(completion.versions)
        if request.expires and not self._is_trainable(completion.versions):
            self.stale = Stamps.joined([self.stale, stamps])
            return None
        self.num_resumed += len(completion.tokens)
        if request.expires:
            self.resumed = Stamps.joined([self.resumed, stamps])
        return completion


class Attempt:
    """One attempt at a group, with the versions of its tokens so far."""

    def __init__(self, number: int, *, tries: int = 0) -> None:
        self.number = number
        self.tries = tries  # before this one
        self.stamps = Stamps(counts={})  # of all completions that were returned
        self.given_up = Stamps(counts={})  # of these, those of episodes that the group left out
        self.finished: list[int] = []  # lengths of completions that the model ended
        self.cut: list[int] = []  # lengths of other completions
        self.partial: PartialRollout | None = None  # where partial rollouts are saved

    @property
    def known(self) -> Stamps:
        """All tokens that are certainly part of the group; resumed ones may count twice."""
        resumed = [] if self.partial is None else [self.partial.resumed]
        return Stamps.joined([self.stamps, *resumed])

    def record(self, completions: Sequence[Completion], *, num_known: int = 0) -> None:
        """Raises Expired if a completion was ended because it is too stale. `num_known`: tokens at
        the beginning that were recorded with another completion."""
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
        """The mean number of further tokens over recent completions that were longer."""
        longer = [other - length for other in self._lengths if other > length]
        return float(np.mean(longer)) if longer else 0.0
