"""What requests that stream have sampled and nobody was told yet.

Promise: of each sequence every token is told once, in order, with its logprob, version and kept
ids; the piece with its last token says how it ended. Those at leisure are told apart, when that is
asked for, and not at all once their request has ended. Sequences that do not stream cost nothing.
Called by the engine's thread, between two forward passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from millrace.core.records import Piece
from millrace.engines.embedded.lanes import Lanes
from millrace.engines.embedded.sequence import Sequence


@dataclass(kw_only=True, slots=True, eq=False)
class _Stream:
    sequence: Sequence
    num_told: int  # of its sampled tokens


class Streams:
    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._open: dict[str, list[_Stream]] = {}  # by request
        self._at_leisure: dict[str, list[_Stream]] = {}

    def open(self, sequences: Iterable[Sequence]) -> None:
        """From now on tell what these sample; they are one request's. What they have already is
        known: they go on from it."""
        for sequence in sequences:
            num_told = len(sequence.tokens) - sequence.num_prompt
            stream = _Stream(sequence=sequence, num_told=num_told)
            streams = self._at_leisure if sequence.request.at_leisure else self._open
            streams.setdefault(sequence.request.id, []).append(stream)

    def take(self) -> dict[str, list[Piece]]:
        """By request, what is new."""
        news: dict[str, list[Piece]] = {}
        for id, streams in list(self._open.items()):
            if pieces := [piece for stream in streams if (piece := self._piece(stream))]:
                news[id] = pieces
            self._open[id] = [stream for stream in streams if stream.sequence.finish is None]
            if not self._open[id]:
                del self._open[id]
        return news

    def take_at_leisure(self) -> dict[str, list[Piece]]:
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

    def _piece(self, stream: _Stream) -> Piece | None:
        sequence, start = stream.sequence, stream.num_told
        tokens, logprobs, versions = self._lanes.sampled_by(sequence)
        if len(tokens) - start < sequence.request.piece_tokens and sequence.finish is None:
            return None
        if sequence.request.at_leisure and len(tokens) == start:
            return None
        stream.num_told = len(tokens)
        truncates = sequence.request.sampling.truncates
        return Piece(
            member=sequence.member,
            # Copies: a lane's arrays go on changing while these travel.
            tokens=tokens[start:].copy(),
            logprobs=logprobs[start:].copy(),
            versions=versions[start:].copy(),
            kept=sequence.kept.since(start) if truncates else None,
            finish=sequence.finish,
        )
