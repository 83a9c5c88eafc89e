"""Requests and what they came to: completions are gathered here until all of a request are there.

Making a record takes host time (text is decoded), so what ends in a round is noted first and
recorded while the device works. Called by the engine's thread.
"""

from dataclasses import dataclass

import numpy as np

from millrace.core.records import Completion, Finish, Request
from millrace.engines.embedded.sequence import Sequence
from millrace.engines.embedded.stopping import Stopping


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finished:
    """All n completions of a request, in order."""

    id: str
    completions: list[Completion]


class Outcomes:
    def __init__(self, stopping: Stopping, *, block_tokens: int) -> None:
        self._stopping = stopping
        self._block_tokens = block_tokens
        self._ended: list[tuple[Sequence, Finish]] = []  # to be recorded
        self._unfinished: dict[str, list[Completion | None]] = {}  # by request; None = not yet
        self._finished: list[Finished] = []  # not yet handed out

    @property
    def has_any(self) -> bool:
        """True if take() would return something once record() was called, or soon after."""
        return bool(self._finished or self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def expect(self, request: Request) -> None:
        self._unfinished[request.id] = [None] * request.n

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
        completions = self._unfinished[id]
        completions[sequence.member] = sequence.completion(
            finish=finish, text=text, block_tokens=self._block_tokens
        )
        done = [completion for completion in completions if completion is not None]
        if len(done) == len(completions):
            del self._unfinished[id]
            self._finished.append(Finished(id=id, completions=done))

    def versions_of(self, request_id: str) -> list[np.ndarray]:
        """Of the completions that an unfinished request has already."""
        return [done.versions for done in self._unfinished[request_id] if done is not None]

    def take(self) -> list[Finished]:
        """What is finished and was not handed out."""
        finished, self._finished = self._finished, []
        return finished

    def take_one(self, request_id: str) -> list[Finished]:
        """Likewise, of one request: one at most."""
        taken = [finished for finished in self._finished if finished.id == request_id]
        self._finished = [finished for finished in self._finished if finished.id != request_id]
        return taken
