"""Outputs of an engine: when completions end, their records, and chunks of streaming requests.

An EOS token or a stop string ends a completion with "stop"; max_new_tokens or the end of the
context ends it with "length". The tokens of a completion are all that were sampled. Its text has no
EOS token and ends before the first stop string. Building a record takes host time, because text is
decoded. So sequences that end in the decode loop are marked first and recorded while the device
works.

Promise: every token of a streaming sequence is delivered once, in order; the chunk with the last
token states the finish. Coalesced streams are delivered only when asked for, and not at all once
their request has finished. The engine's thread calls everything, between two forward passes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from millrace.core.completions import join_top
from millrace.core.errors import TaskError
from millrace.core.records import Completion, CompletionChunk, FinishReason, Request
from millrace.inference.backend import FinishedCompletions
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import (
    DecodeResult,
    S,
    Sampled,
    Sequence,
    check_request,
    sequences_of,
)

# The first tokens of a tail may decode differently there: three that end a character, and one that
# loses its space.
_HALF_TOKENS = 3
_TAIL_MARGIN = _HALF_TOKENS + 1
_HALF = "\ufffd"  # what half a character decodes to


class StopRules:
    """Decides when completions end, and what their text is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)

    def is_eos(self, tokens: np.ndarray) -> np.ndarray:
        """[N] bool for tokens [N]."""
        return (tokens[:, None] == self._eos_ids).any(axis=1)

    def ends_in_stop_string(self, sampled: np.ndarray, stop: tuple[str, ...]) -> bool:
        """True if the sampled tokens [N], checked after each of them, now contain a stop string."""
        reach = _reach(stop)
        tail = self._decode_from(sampled, max(0, len(sampled) - reach))
        if not any(text in tail for text in stop):
            return False
        whole = tail if len(sampled) <= reach else self._decode(sampled)
        return any(text in whole for text in stop)

    def text(self, sampled: np.ndarray, stop: tuple[str, ...]) -> str:
        """The sampled tokens [N] as text, up to the first stop string."""
        if self.is_eos(sampled[-1:]).any():
            sampled = sampled[:-1]
        text = self._decode(sampled)
        return text[: min((text.find(s) for s in stop if s in text), default=None)]

    def finished_in(
        self, slots: BatchSlots, chosen: np.ndarray, *, has_stop: np.ndarray
    ) -> list[tuple[Sequence, FinishReason]]:
        """The sequences in these slots whose newest token was their last. `has_stop` [R]: of each,
        whether it now has a stop string."""
        num_tokens = slots.num_tokens[chosen]
        stopped = self.is_eos(slots.tokens[chosen, num_tokens - 1]) | has_stop
        ended = stopped | (num_tokens >= slots.limits[chosen])
        return [
            (slots.sequence(chosen[row]), "stop" if stopped[row] else "length")
            for row in np.flatnonzero(ended)
        ]

    def counts_until_stop(
        self, slots: BatchSlots, chosen: np.ndarray, result: DecodeResult
    ) -> tuple[np.ndarray, np.ndarray]:
        """[R] number of new tokens of each slot up to its first EOS token or stop string; [R] if it
        has a stop string."""
        is_eos = self.is_eos(result.tokens.ravel()).reshape(result.tokens.shape)
        first = np.where(is_eos.any(0), is_eos.argmax(0) + 1, len(is_eos))
        counts, has_stop = np.minimum(result.counts, first), np.zeros(len(chosen), dtype=bool)
        for row in np.flatnonzero(slots.has_stop_strings[chosen]):
            sequence = slots.sequence(chosen[row])
            earlier, _, _ = slots.sampled_by(sequence)
            stop = sequence.request.sampling.stop
            sampled = np.concatenate([earlier, result.tokens[: counts[row], row]])
            # One look at all new tokens rules out nearly every launch.
            text = self._decode_from(sampled, start := max(0, len(earlier) - _reach(stop)))
            is_whole = _HALF not in text or not self._has_half(earlier, start, text)
            if is_whole and not any(one in text or _HALF in one for one in stop):
                continue
            for count in range(1, counts[row] + 1):
                if self.ends_in_stop_string(sampled[: len(earlier) + count], stop):
                    counts[row], has_stop[row] = count, True
                    break
        return counts, has_stop

    def finish_on_arrival(
        self, sequence: Sequence, *, max_context: int, expired_before: int = 0
    ) -> FinishReason | None:
        """How a partial completion had already ended when it arrived; None if it had not."""
        sampled, sampling = sequence.tokens[sequence.num_prompt :], sequence.request.sampling
        has_stop = bool(sampling.stop) and self.ends_in_stop_string(sampled, sampling.stop)
        if has_stop or self.is_eos(sampled[-1:]).any():
            return "stop"
        if len(sequence.tokens) >= max_context or len(sampled) >= sampling.max_new_tokens:
            return "length"
        is_old = sequence.request.expires and (sequence.versions < expired_before).any()
        return "expire" if is_old else None

    def _has_half(self, earlier: np.ndarray, start: int, text: str) -> bool:
        """Whether `text`, of the tokens from `start` on, has half a character after `earlier`. It
        may hide a stop string: some tokenizers decode all bytes beside it to U+FFFD, too."""
        known = self._decode_from(earlier, start).rstrip(_HALF)
        return _HALF in text[len(known) :] or not text.startswith(known)

    def _decode_from(self, sampled: np.ndarray, start: int) -> str:
        """The text of the tokens from `start` on, without what only ends a character."""
        text = self._decode(sampled[start:])
        most = start + _HALF_TOKENS if start else 0
        while text.startswith(_HALF) and start < most:
            start += 1
            text = self._decode(sampled[start:])
        return text

    def _decode(self, tokens: np.ndarray) -> str:
        # Special tokens stay: a stop string may be one.
        text = self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _reach(stop: tuple[str, ...]) -> int:
    """The last tokens that a stop string can lie in: each decodes to at least one byte."""
    return max(len(text.encode()) for text in stop) + _TAIL_MARGIN


@dataclass(eq=False)
class OutputProcessor:
    """The requests of an engine: their completions, and the chunks of those that stream."""

    rules: StopRules
    _: KW_ONLY
    sampled_by: Callable[[Any], Sampled]
    max_context: int
    vocab_size: int
    block_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_arrived = 0  # sequences
        self._expired_before: dict[str | None, int] = {None: 0}  # by adapter; see expired()
        self._ended: list[tuple[Sequence, FinishReason]] = []  # to be recorded
        # By unfinished request: the versions of its members that have ended.
        self._unfinished: dict[str, list[np.ndarray]] = {}
        self._finished: dict[str, dict[int, Completion]] = {}  # by request; for take()
        # By request; those that are coalesced apart, because each step looks at the others.
        self._streams: dict[bool, dict[str, list[Sequence]]] = {False: {}, True: {}}

    @property
    def has_pending(self) -> bool:
        """True if completions wait for record() or take()."""
        return bool(self._finished or self._ended)

    def open(
        self,
        request: Request,
        *,
        stream: bool,
        kind: type[S] = Sequence,
        records_kept: bool = True,
        **options: Any,  # of sequences_of()
    ) -> list[S]:
        """The sequences of a new request that are to be sampled: none if it resumes a completion
        that has ended. `stream`: the tokens they sample from now on become chunks."""
        if request.id in self._unfinished or request.id in self._finished:
            raise TaskError(f"Request {request.id!r} is already here; give each its own id.")
        limits = {"max_context": self.max_context, "vocab_size": self.vocab_size}
        check_request(request, records_kept=records_kept, **limits)
        options["first_arrival"] = self.num_arrived
        sequences = sequences_of(request, kind=kind, records_kept=records_kept, **options)
        self.num_arrived += request.n
        self._unfinished[request.id] = []
        if stream:
            self._streams[request.coalesce][request.id] = [*sequences]
        if request.partial is not None and self.end_on_arrival(sequences[0]):
            return []
        return sequences

    def end_on_arrival(self, sequence: Sequence) -> bool:
        """Whether a sequence with tokens has already ended; if so, its completion is built."""
        finish = self.rules.finish_on_arrival(
            sequence,
            max_context=self.max_context,
            expired_before=self._before(sequence.request.adapter),
        )
        if finish is not None:
            self.end(sequence, finish=finish)
        return finish is not None

    def mark_ended(self, sequence: Sequence, *, finish: FinishReason) -> None:
        """Leave it to record() to build the completion."""
        sequence.finish = finish
        self._ended.append((sequence, finish))

    def record(self) -> None:
        ended, self._ended = self._ended, []
        for sequence, finish in ended:
            self.end(sequence, finish=finish)

    def end(self, sequence: Sequence, *, finish: FinishReason) -> None:
        """Build a completion; the last one finishes its request."""
        sequence.finish = finish
        request, sampled = sequence.request, sequence.tokens[sequence.num_prompt :]
        text = self.rules.text(sampled, request.sampling.stop)
        completion = sequence.completion(finish=finish, text=text, block_tokens=self.block_tokens)
        self._finished.setdefault(request.id, {})[sequence.member] = completion
        versions = self._unfinished[request.id]
        versions.append(completion.versions)
        if len(versions) == request.n:
            del self._unfinished[request.id]

    def expired(
        self,
        before: int,
        unfinished: Iterable[Sequence],
        adapters: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Requests with `expires` set that have a token older than this version; those that arrive
        with one later end at once. `adapters`: versions of those that have their own."""
        for name, oldest in {None: before, **(adapters or {})}.items():
            self._expired_before[name] = max(oldest, self._expired_before.get(name, 0))
        expiring = [s for s in unfinished if s.request.expires]
        members = [
            (s.request.id, each, self._before(s.request.adapter))
            for s in expiring
            for each in (self.sampled_by(s)[2], *self._unfinished[s.request.id])
        ]
        return [*dict.fromkeys(id for id, own, oldest in members if (own < oldest).any())]

    def _before(self, adapter: str | None) -> int:
        return self._expired_before.get(adapter, self._expired_before[None])

    def take(self) -> list[FinishedCompletions]:
        """The completions that were not taken before."""
        finished, self._finished = self._finished, {}
        return [
            FinishedCompletions(id=id, completions=ended, is_last=id not in self._unfinished)
            for id, ended in finished.items()
        ]

    def take_chunks(self, *, coalesced: bool) -> dict[str, list[CompletionChunk]]:
        chunks: dict[str, list[CompletionChunk]] = {}
        unfinished: dict[str, list[Sequence]] = {}
        for id, streams in self._streams[coalesced].items():
            left = [sequence for sequence in streams if sequence.finish is None]
            if left:
                unfinished[id] = left
            if left or not coalesced:
                chunks[id] = [chunk for sequence in streams if (chunk := self._chunk(sequence))]
        self._streams[coalesced] = unfinished
        return {id: new for id, new in chunks.items() if new}

    def _chunk(self, sequence: Sequence) -> CompletionChunk | None:
        start = sequence.num_streamed
        tokens, logprobs, versions = self.sampled_by(sequence)
        if len(tokens) - start < sequence.request.min_chunk_tokens and sequence.finish is None:
            return None
        if sequence.request.coalesce and len(tokens) == start:
            return None
        sequence.num_streamed = len(tokens)
        return CompletionChunk(
            member=sequence.member,
            # Copies, because the arrays of a slot change while the chunk is sent.
            tokens=tokens[start:].copy(),
            logprobs=logprobs[start:].copy(),
            versions=versions[start:].copy(),
            kept=None if sequence.kept is None else sequence.kept.since(start),
            top=join_top(sequence.top[len(sequence.top) - (len(tokens) - start) :]),
            finish=sequence.finish,
        )
