"""The course of a group in flight: what engines have told it, so that it is not lost in a crash.

Promise: what was written down before a crash is told again to whoever asks for the same: tokens,
logprobs, versions and kept ids as they were. What would break the staleness rule is not, nor what
nobody asks for any more; both are counted. Runs on the controller's event loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from millrace.core.completions import cut, joined
from millrace.core.progress import Progress, Told, digest_of, put_together
from millrace.core.records import Completion, Piece, Request
from millrace.core.staleness import Stamps

IsFit = Callable[[np.ndarray], bool]  # versions [N] of tokens: may they still be trained?


class Course:
    """Of one attempt at a group."""

    def __init__(self, known: Iterable[Progress] = (), *, is_fit: IsFit = lambda _: True) -> None:
        parts = list(known)
        self.num_parts = len(parts)  # written down so far
        self.num_given = 0  # known tokens that were told again
        self.given = Stamps(counts={})  # of these, those that are trained
        self.outdated = Stamps(counts={})  # known, and too stale to be told again
        self._is_fit = is_fit
        self._known = put_together(told for part in parts for told in part.told)
        self._news: list[Told] = []

    @property
    def unasked(self) -> Stamps:
        """Known, and not asked for so far."""
        return Stamps.joined(Stamps.of(one.completion.versions) for one in self._known.values())

    def ask(self, request: Request, *, model: str | None = None) -> "Asked":
        """`model`: whom the request is for, if that is not the policy."""
        digest = digest_of(request, model=model)
        known = [self._recall(request, member, digest) for member in range(request.n)]
        return Asked(request, digest=digest, known=known, note=self._news.append)

    def take(self) -> Progress | None:
        """What is new; the next part to be written down."""
        if not self._news:
            return None
        told = tuple(self._news)
        self._news.clear()
        return Progress(told=told)

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


class Asked:
    """One request of a group: what is known of its completions, and what is told of them now."""

    def __init__(
        self,
        request: Request,
        *,
        digest: str,
        known: list[Completion | None],
        note: Callable[[Told], None],
    ) -> None:
        """`known`: of each of its completions; some may have ended."""
        self.known = known
        self._request = request
        self._digest = digest
        self._note = note
        self._num_noted = [0 if one is None else len(one.tokens) for one in known]
        self._has_ended = [one is not None and has_ended(one) for one in known]

    def hear(self, piece: Piece) -> None:
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
            Told(
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
