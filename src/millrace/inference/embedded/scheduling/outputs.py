"""Outputs of an engine: completions by request, and chunks of streaming requests.

Building a record takes host time, because text is decoded. So sequences that end in the decode loop
are marked first and recorded while the device works.

Promise: every token of a streaming sequence is delivered once, in order, with its logprob, version
and kept ids; the chunk with the last token states the finish. Coalesced streams are delivered only
when asked for, and not at all once their request has finished. Sequences that do not stream cost
nothing. The engine's thread calls everything, between two forward passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Finish, Request
from millrace.inference.backend import FinishedRequest
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import Sequence
from millrace.inference.embedded.scheduling.stopping import StopRules


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PendingRequest:
    completions: list[Completion | None]  # None = not yet
    per_completion: bool  # each is wanted as soon as it has ended
    delivered: set[int] = field(default_factory=set[int])


class OutputProcessor:
    def __init__(self, stopping: StopRules, *, block_tokens: int) -> None:
        self._stopping = stopping
        self._block_tokens = block_tokens
        self._ended: list[tuple[Sequence, Finish]] = []  # to be recorded
        self._unfinished: dict[str, _PendingRequest] = {}  # by request
        self._ended_early: dict[
            str, dict[int, Completion]
        ] = {}  # of these requests; to be delivered
        self._finished: list[FinishedRequest] = []  # not yet handed out

    @property
    def has_pending(self) -> bool:
        """True if take() would return something once record() was called, or soon after."""
        return bool(self._finished or self._ended)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def add(self, request: Request, *, per_completion: bool = False) -> None:
        pending = _PendingRequest(completions=[None] * request.n, per_completion=per_completion)
        self._unfinished[request.id] = pending

    def mark_ended(self, sequence: Sequence, *, finish: Finish) -> None:
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
        pending = self._unfinished[id]
        completion = sequence.completion(finish=finish, text=text, block_tokens=self._block_tokens)
        pending.completions[sequence.member] = completion
        done = [completion for completion in pending.completions if completion is not None]
        if len(done) == len(pending.completions):
            del self._unfinished[id]
            self._ended_early.pop(id, None)
            delivered = frozenset(pending.delivered)
            self._finished.append(FinishedRequest(id=id, completions=done, delivered=delivered))
        elif pending.per_completion:
            self._ended_early.setdefault(id, {})[sequence.member] = completion

    def versions_of(self, request_id: str) -> list[np.ndarray]:
        """Of the completions that an unfinished request has already."""
        completions = self._unfinished[request_id].completions
        return [done.versions for done in completions if done is not None]

    def take_completions(self) -> dict[str, dict[int, Completion]]:
        """Completions of unfinished `per_completion` requests that ended since the last call, by
        request id and index."""
        ended_early, self._ended_early = self._ended_early, {}
        for id, ended in ended_early.items():
            self._unfinished[id].delivered.update(ended)
        return ended_early

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
    num_sent: int  # of its sampled tokens


class ChunkStreams:
    def __init__(self, slots: BatchSlots) -> None:
        self._slots = slots
        self._open: dict[str, list[_Stream]] = {}  # by request
        self._coalesced: dict[str, list[_Stream]] = {}

    def open(self, sequences: Iterable[Sequence]) -> None:
        """From now on tell what these sample; they are one request's. What they have already is
        known: they go on from it."""
        for sequence in sequences:
            num_sent = len(sequence.tokens) - sequence.num_prompt
            stream = _Stream(sequence=sequence, num_sent=num_sent)
            streams = self._coalesced if sequence.request.coalesce else self._open
            streams.setdefault(sequence.request.id, []).append(stream)

    def take(self) -> dict[str, list[CompletionChunk]]:
        """By request, what is new."""
        new: dict[str, list[CompletionChunk]] = {}
        for id, streams in list(self._open.items()):
            if chunks := [chunk for stream in streams if (chunk := self._chunk(stream))]:
                new[id] = chunks
            self._open[id] = [stream for stream in streams if stream.sequence.finish is None]
            if not self._open[id]:
                del self._open[id]
        return new

    def take_coalesced(self) -> dict[str, list[CompletionChunk]]:
        """The same of requests that are delivered at leisure."""
        is_over = {
            id: all(stream.sequence.finish is not None for stream in streams)
            for id, streams in self._coalesced.items()
        }
        self._coalesced = {id: s for id, s in self._coalesced.items() if not is_over[id]}
        delivered = {
            id: [chunk for stream in streams if (chunk := self._chunk(stream))]
            for id, streams in self._coalesced.items()
        }
        return {id: chunks for id, chunks in delivered.items() if chunks}

    def _chunk(self, stream: _Stream) -> CompletionChunk | None:
        sequence, start = stream.sequence, stream.num_sent
        tokens, logprobs, versions = self._slots.sampled_by(sequence)
        if len(tokens) - start < sequence.request.min_chunk_tokens and sequence.finish is None:
            return None
        if sequence.request.coalesce and len(tokens) == start:
            return None
        stream.num_sent = len(tokens)
        truncates = sequence.request.sampling.truncates
        return CompletionChunk(
            member=sequence.member,
            # Copies: a slot's arrays go on changing while these travel.
            tokens=tokens[start:].copy(),
            logprobs=logprobs[start:].copy(),
            versions=versions[start:].copy(),
            kept=sequence.kept.since(start) if truncates else None,
            finish=sequence.finish,
        )
