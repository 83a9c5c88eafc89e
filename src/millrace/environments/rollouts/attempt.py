"""The course of a group in flight: what engines have told it, so that it is not lost in a crash.

Promise: what was written down before a crash is told again to whoever asks for the same: tokens,
logprobs, versions and kept ids as they were. What would break the staleness rule is not, nor what
nobody asks for any more; both are counted. Runs on the controller's event loop.

Groups that can no longer be trained within the staleness limit: what they were, and what giving
them up at once has saved.

A running group is trained by the next take at the earliest. Once the limit certainly rules it out
there, nothing it still does is of use. While it generates, that is certain only if one token
decides (StalenessLimit.one_token_decides); engines know the tokens of unfinished completions, an
Attempt those of finished ones. Once it is complete, the limit says it exactly.

Called from the controller's event loop only.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from millrace.core.completions import cut, joined
from millrace.core.partials import StreamedTokens, digest_of, put_together
from millrace.core.records import Completion, CompletionChunk, Request
from millrace.core.staleness import Stamps

IsFit = Callable[[np.ndarray], bool]  # versions [N] of tokens: may they still be trained?


class PartialRollout:
    """Of one attempt at a group."""

    def __init__(
        self, known: Iterable[StreamedTokens] = (), *, is_fit: IsFit = lambda _: True
    ) -> None:
        self.num_given = 0  # known tokens that were told again
        self.given = Stamps(counts={})  # of these, those that are trained
        self.outdated = Stamps(counts={})  # known, and too stale to be told again
        self._is_fit = is_fit
        self._known = put_together(known)
        self._news: list[StreamedTokens] = []

    @property
    def unasked(self) -> Stamps:
        """Known, and not asked for so far."""
        return Stamps.joined(Stamps.of(one.completion.versions) for one in self._known.values())

    def ask(self, request: Request, *, model: str | None = None) -> "PartialCall":
        """`model`: whom the request is for, if that is not the policy."""
        digest = digest_of(request, model=model)
        known = [self._recall(request, member, digest) for member in range(request.n)]
        return PartialCall(request, digest=digest, known=known, note=self._news.append)

    def take(self) -> list[StreamedTokens]:
        """What is new; the next part to be written down."""
        told, self._news[:] = list(self._news), []
        return told

    def _recall(self, request: Request, member: int, digest: str) -> Completion | None:
        known = self._known.get((request.id, member))
        if known is None or known.digest != digest:
            return None
        del self._known[request.id, member]
        completion = known.completion
        stamps = Stamps.of(completion.versions)
        if request.expires and not self._is_fit(completion.versions):
            self.outdated = Stamps.joined([self.outdated, stamps])
            return None
        self.num_given += len(completion.tokens)
        if request.expires:
            self.given = Stamps.joined([self.given, stamps])
        return completion


class PartialCall:
    """One request of a group: what is known of its completions, and what is told of them now."""

    def __init__(
        self,
        request: Request,
        *,
        digest: str,
        known: list[Completion | None],
        note: Callable[[StreamedTokens], None],
    ) -> None:
        """`known`: of each of its completions; some may have ended."""
        self.known = known
        self._request = request
        self._digest = digest
        self._note = note
        self._num_noted = [0 if one is None else len(one.tokens) for one in known]
        self._has_ended = [one is not None and has_ended(one) for one in known]

    def hear(self, piece: CompletionChunk) -> None:
        begun = self._request.partial if not self._num_noted[piece.member] else None
        parts = [piece] if begun is None else [begun, piece]
        self._add(piece.member, joined(parts, truncates=self._request.sampling.truncates))

    def hear_end(self, member: int, completion: Completion) -> None:
        """No matter if that is known already."""
        if self._has_ended[member] or not has_ended(completion):
            return
        self._has_ended[member] = True
        rest = cut(completion, self._num_noted[member])
        end = {"finish": completion.finish, "text": completion.text, "kv": completion.kv}
        self._add(member, replace(rest, **end))

    def _add(self, member: int, part: Completion) -> None:
        start = self._num_noted[member]
        self._num_noted[member] += len(part.tokens)
        self._note(
            StreamedTokens(
                request=self._request.id,
                digest=self._digest,
                member=member,
                start=start,
                part=part,
            )
        )


def has_ended(completion: Completion) -> bool:
    """By itself; what was ended by others may go on elsewhere."""
    return completion.finish in ("stop", "length")


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
        self.course: PartialRollout | None = None  # what it was told, if that is written down

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
