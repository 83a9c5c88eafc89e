"""Requests and what they came to: completions are gathered here until all of a request are there,
or are told one by one, where that is wanted.

Making a record takes host time (text is decoded), so what ends in a round is noted first and
recorded while the device works. Called by the engine's thread.
"""

from dataclasses import dataclass, field

import numpy as np

from millrace.core.records import Completion, Finish, Request
from millrace.engines.embedded.sequence import Sequence
from millrace.engines.embedded.stopping import Stopping


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finished:
    """All n completions of a request, in order."""

    id: str
    completions: list[Completion]
    told: frozenset[int] = frozenset()  # of these, which were told before


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Expected:
    completions: list[Completion | None]  # None = not yet
    singly: bool  # each is wanted as soon as it has ended
    told: set[int] = field(default_factory=set[int])


class Outcomes:
    def __init__(self, stopping: Stopping, *, block_tokens: int) -> None:
        self._stopping = stopping
        self._block_tokens = block_tokens
        self._ended: list[tuple[Sequence, Finish]] = []  # to be recorded
        self._unfinished: dict[str, _Expected] = {}  # by request
        self._singles: dict[str, dict[int, Completion]] = {}  # of these requests; to be told
        self._finished: list[Finished] = []  # not yet handed out

    @property
    def has_any(self) -> bool:
        """True if take() would return something once record() was called, or soon after."""
        return bool(self._finished or self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def expect(self, request: Request, *, singly: bool = False) -> None:
        expected = _Expected(completions=[None] * request.n, singly=singly)
        self._unfinished[request.id] = expected

    def note(self, sequence: Sequence, *, finish: Finish) -> None:
        """This sequence has ended; record() will make its record."""
        sequence.finish = finish
        self._ended.append((sequence, finish))

    def record(self) -> None:
        ended, self._ended = self._ended, []
        for sequence, finish in ended:
            self.end(sequence, finish=finish)

    def end(self, sequence: Sequence, *, finish: Finish) -> None:
        """Record a completion; with the last of its request, the request is finished."""
        sequence.finish = finish
        id, sampled = sequence.request.id, sequence.tokens[sequence.num_prompt :]
        text = self._stopping.text(sampled, sequence.request.sampling.stop)
        expected = self._unfinished[id]
        completion = sequence.completion(finish=finish, text=text, block_tokens=self._block_tokens)
        expected.completions[sequence.member] = completion
        done = [completion for completion in expected.completions if completion is not None]
        if len(done) == len(expected.completions):
            del self._unfinished[id]
            self._singles.pop(id, None)
            told = frozenset(expected.told)
            self._finished.append(Finished(id=id, completions=done, told=told))
        elif expected.singly:
            self._singles.setdefault(id, {})[sequence.member] = completion

    def versions_of(self, request_id: str) -> list[np.ndarray]:
        """Of the completions that an unfinished request has already."""
        completions = self._unfinished[request_id].completions
        return [done.versions for done in completions if done is not None]

    def take_singles(self) -> dict[str, dict[int, Completion]]:
        """By request that is not finished and wants them singly: what ended and was not handed
        out."""
        singles, self._singles = self._singles, {}
        for id, ended in singles.items():
            self._unfinished[id].told.update(ended)
        return singles

    def take(self) -> list[Finished]:
        """What is finished and was not handed out."""
        finished, self._finished = self._finished, []
        return finished

    def take_one(self, request_id: str) -> list[Finished]:
        """Likewise, of one request: one at most."""
        taken = [finished for finished in self._finished if finished.id == request_id]
        self._finished = [finished for finished in self._finished if finished.id != request_id]
        return taken
