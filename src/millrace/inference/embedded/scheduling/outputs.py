"""Requests and what they came to: completions are gathered here until all of a request are there,
or are told one by one, where that is wanted.

Making a record takes host time (text is decoded), so what ends in a round is noted first and
recorded while the device works. Called by the engine's thread.

What requests that stream have sampled and nobody was told yet.

Promise: of each sequence every token is told once, in order, with its logprob, version and kept
ids; the piece with its last token says how it ended. Those at leisure are told apart, when that is
asked for, and not at all once their request has ended. Sequences that do not stream cost nothing.
Called by the engine's thread, between two forward passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Finish, Request
from millrace.inference.backend import FinishedRequest
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import Sequence
from millrace.inference.embedded.scheduling.stopping import Stopping


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Expected:
    completions: list[Completion | None]  # None = not yet
    per_completion: bool  # each is wanted as soon as it has ended
    told: set[int] = field(default_factory=set[int])


class Outcomes:
    def __init__(self, stopping: Stopping, *, block_tokens: int) -> None:
        self._stopping = stopping
        self._block_tokens = block_tokens
        self._ended: list[tuple[Sequence, Finish]] = []  # to be recorded
        self._unfinished: dict[str, _Expected] = {}  # by request
        self._singles: dict[str, dict[int, Completion]] = {}  # of these requests; to be told
        self._finished: list[FinishedRequest] = []  # not yet handed out

    @property
    def has_any(self) -> bool:
        """True if take() would return something once record() was called, or soon after."""
        return bool(self._finished or self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def expect(self, request: Request, *, per_completion: bool = False) -> None:
        expected = _Expected(completions=[None] * request.n, per_completion=per_completion)
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
            delivered = frozenset(expected.told)
            self._finished.append(FinishedRequest(id=id, completions=done, delivered=delivered))
        elif expected.per_completion:
            self._singles.setdefault(id, {})[sequence.member] = completion

    def versions_of(self, request_id: str) -> list[np.ndarray]:
        """Of the completions that an unfinished request has already."""
        completions = self._unfinished[request_id].completions
        return [done.versions for done in completions if done is not None]

    def take_singles(self) -> dict[str, dict[int, Completion]]:
        """Completions of unfinished `per_completion` requests that ended since the last call, by
        request id and index."""
        singles, self._singles = self._singles, {}
        for id, ended in singles.items():
            self._unfinished[id].told.update(ended)
        return singles

    def take(self) -> list[FinishedRequest]:
        """What is finished and was not handed out."""
        finished, self._finished = self._finished, []
        return finished

    def take_one(self, request_id: str) -> list[FinishedRequest]:
        """Likewise, of one request: one at most."""
        taken = [finished for finished in self._finished if finished.id == request_id]
        self._finished = [finished for finished in self._finished if finished.id != request_id]
        return taken


@dataclass(kw_only=True, slots=True, eq=False)
class _Stream:
    sequence: Sequence
    num_told: int  # of its sampled tokens


class Streams:
    def __init__(self, lanes: BatchSlots) -> None:
        self._lanes = lanes
        self._open: dict[str, list[_Stream]] = {}  # by request
        self._at_leisure: dict[str, list[_Stream]] = {}

    def open(self, sequences: Iterable[Sequence]) -> None:
        """From now on tell what these sample; they are one request's. What they have already is
        known: they go on from it."""
        for sequence in sequences:
            num_told = len(sequence.tokens) - sequence.num_prompt
            stream = _Stream(sequence=sequence, num_told=num_told)
            streams = self._at_leisure if sequence.request.coalesce else self._open
            streams.setdefault(sequence.request.id, []).append(stream)

    def take(self) -> dict[str, list[CompletionChunk]]:
        """By request, what is new."""
        news: dict[str, list[CompletionChunk]] = {}
        for id, streams in list(self._open.items()):
            if pieces := [piece for stream in streams if (piece := self._piece(stream))]:
                news[id] = pieces
            self._open[id] = [stream for stream in streams if stream.sequence.finish is None]
            if not self._open[id]:
                del self._open[id]
        return news

    def take_at_leisure(self) -> dict[str, list[CompletionChunk]]:
        """The same of requests that are told at leisure."""
        is_over = {
            id: all(stream.sequence.finish is not None for stream in streams)
            for id, streams in self._at_leisure.items()
        }
        self._at_leisure = {id: s for id, s in self._at_leisure.items() if not is_over[id]}
        told = {
            id: [piece for stream in streams if (piece := self._piece(stream))]
            for id, streams in self._at_leisure.items()
        }
        return {id: pieces for id, pieces in told.items() if pieces}

    def _piece(self, stream: _Stream) -> CompletionChunk | None:
        sequence, start = stream.sequence, stream.num_told
        tokens, logprobs, versions = self._lanes.sampled_by(sequence)
        if len(tokens) - start < sequence.request.min_chunk_tokens and sequence.finish is None:
            return None
        if sequence.request.coalesce and len(tokens) == start:
            return None
        stream.num_told = len(tokens)
        truncates = sequence.request.sampling.truncates
        return CompletionChunk(
            member=sequence.member,
            # Copies: a lane's arrays go on changing while these travel.
            tokens=tokens[start:].copy(),
            logprobs=logprobs[start:].copy(),
            versions=versions[start:].copy(),
            kept=sequence.kept.since(start) if truncates else None,
            finish=sequence.finish,
        )
