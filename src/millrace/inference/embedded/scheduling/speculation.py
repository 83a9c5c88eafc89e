"""Speculation without a draft model: which drafts a pass computes, and what a pass costs.

The pass that feeds the newest token of a sequence feeds its draft behind it, draws a token at each
of these positions, and keeps the draws up to the first that differs from the draft. A draw depends
on the seed, the index and the position of its token alone, so these are the tokens of plain
decoding.

Promise: drafts change how many tokens a pass yields, and never which. There are drafts only if they
promise more tokens per second: by the share of right drafts of each sequence, and by the time of
passes as measured. Text without repetition adds no row to a pass. Known text is bounded: it is
forgotten with the prompt that was least recently used. The engine's thread calls everything.
"""

from collections import OrderedDict

import numpy as np
import xxhash

from millrace.core.records import Request
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.drafts import NGRAM, DraftCursor, NgramIndex
from millrace.inference.embedded.scheduling.sequence import (
    NO_TOKEN,
    BatchPlan,
    DecodeResult,
    Sequence,
)

MAX_LIVE = 16  # sequences; with more, a pass has enough rows without drafts
_MAX_DRAFT = 31  # tokens
_MIN_SHARE = 0.25  # of right drafts
_MIN_GAIN = 1.1  # in tokens per second, or there are no drafts
_RECOVERY = 0.02  # of what drafts gained less than promised, per pass without drafts
_KNOWN_TOKENS = 2**18  # of all prompts and ended completions, about 200 bytes each
_EXACT_ROWS = 8  # passes of more rows share a measurement with up to seven neighbours
_FREE_ROWS = 8  # rows that cost as much as a pass by itself, until that is measured
_MAX_AGE = 128  # passes after which a measurement with drafts is forgotten


class PassTimes:
    """Seconds of a forward pass by its number of rows, as lately measured."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, int]] = {}  # and the pass of the last measurement
        self._num_passes = 0

    def observe(self, rows: int, seconds: float) -> None:
        self._num_passes += 1
        key = rows if rows <= _EXACT_ROWS else -(-rows // _EXACT_ROWS) * _EXACT_ROWS
        known, _ = self._times.get(key, (seconds, 0))
        # One slow pass says little: the host may have been busy.
        seconds = known + 0.25 * (min(seconds, 2.0 * known) - known)
        self._times[key] = seconds, self._num_passes

    def estimate(self, rows: np.ndarray) -> np.ndarray:
        """Seconds for these ascending numbers of rows [N], of which the first has no drafts; ones
        if nothing was measured."""
        oldest, plain = self._num_passes - _MAX_AGE, rows[0]
        times = self._times.items()
        known = sorted((key, s) for key, (s, at) in times if at > oldest or key <= plain)
        if not known:
            return np.ones(len(rows))
        keys, seconds = np.array(known).T
        nearest = np.clip(rows, keys[0], keys[-1])
        beyond = (rows + _FREE_ROWS) / (nearest + _FREE_ROWS)
        return np.interp(nearest, keys, seconds) * beyond


class DraftProposer:
    """Chooses drafts for the running sequences of an engine."""

    def __init__(self, slots: BatchSlots, *, max_known: int = _KNOWN_TOKENS) -> None:
        """`max_known`: tokens of prompts and ended completions."""
        self._slots = slots
        self._max_known = max_known
        self._indexes = OrderedDict[tuple[str, int, bytes], NgramIndex]()  # least recent first
        self.num_known = 0  # tokens in them
        self._times = PassTimes()
        # Recent tokens that were accepted, and those that the shares had promised.
        self._accepted = self._promised = 4.0
        self._next_promise = 0.0
        self.num_drafted = self.num_accepted = 0  # tokens

    def observe(self, plan: BatchPlan, *, seconds: float) -> None:
        """The pass took this long."""
        is_decoding = plan.num_single == len(plan.slots) or plan.drafts is not None
        if is_decoding and len(plan.slots) <= MAX_LIVE:
            self._times.observe(int(plan.counts.sum()), seconds)

    def accept(self, plan: BatchPlan, result: DecodeResult) -> DecodeResult:
        """The tokens of each slot up to the first that differs from its draft."""
        assert plan.drafts is not None
        steps = np.arange(len(result.tokens))[:, None]
        at = np.minimum(steps, plan.drafts) + self._slots.num_tokens[plan.slots]
        drafts = self._slots.tokens[plan.slots, np.minimum(at, self._slots.tokens.shape[1] - 1)]
        is_right = (result.tokens == drafts) & (steps < plan.drafts)
        counts = 1 + is_right.cumprod(axis=0).sum(axis=0)
        self.num_drafted += int(plan.drafts.sum())
        num_accepted = int(counts.sum()) - len(counts)
        self.num_accepted += num_accepted
        self._accepted = 0.9 * self._accepted + num_accepted
        self._promised = 0.9 * self._promised + self._next_promise
        return result._replace(
            tokens=np.where(steps < counts, result.tokens, NO_TOKEN), counts=counts
        )

    def remember(self, sequence: Sequence) -> None:
        """Its tokens are drafts for later sequences; called once it has left its slot."""
        if not sequence.has_begun:
            return
        index = self._index_of(sequence.request)
        cursor, sequence.cursor = sequence.cursor, None
        if cursor is None or cursor.index is not index:
            index.put(sequence.tokens[max(0, sequence.num_prompt - NGRAM) :])
        else:
            cursor.read(sequence.tokens[cursor.num_read :].tolist())
        self._grow(index, len(sequence.tokens) - sequence.num_prompt)

    def propose(self, chosen: np.ndarray) -> list[list[int]]:
        """A draft for each of these slots, whose newest token is to be fed; [] if none pays."""
        slots = self._slots
        at = zip(chosen.tolist(), slots.num_tokens[chosen].tolist(), strict=True)
        cursors = [self._cursor(slot, num_tokens) for slot, num_tokens in at]
        shares = [cursor.share for cursor in cursors]
        if max(shares) < _MIN_SHARE:
            return []
        # A grammar, a penalty or top logprobs need the logits of one token at a time.
        single = slots.is_guided | slots.adjusts_logits | (slots.num_top > 0)
        room = np.where(single, 0, slots.limits - slots.num_tokens - 1)[chosen]
        room[np.array(shares) < _MIN_SHARE] = 0
        found = zip(cursors, np.minimum(room, _MAX_DRAFT).tolist(), strict=True)
        drafts = [cursor.draft(most) if most > 0 else [] for cursor, most in found]
        sizes = self._sizes(drafts, shares)
        if not any(sizes):
            return []
        return [draft[:size] for draft, size in zip(drafts, sizes, strict=True)]

    def _sizes(self, drafts: list[list[int]], shares: list[float]) -> list[int]:
        """How many tokens of each draft to compute, for the most tokens per second."""
        # The probability that a token of a draft is reached and right, by sequence; best first.
        chances = [
            (share**place, row)
            for row, (draft, share) in enumerate(zip(drafts, shares, strict=True))
            for place in range(1, len(draft) + 1)
        ]
        chances.sort(reverse=True)
        promised = np.cumsum([0.0, *(chance for chance, _ in chances)])
        gained = len(drafts) + promised * min(1.0, self._accepted / self._promised)
        rates = gained / self._times.estimate(len(drafts) + np.arange(len(gained)))
        best = int(rates.argmax())
        if rates[best] < _MIN_GAIN * rates[0]:
            best = 0
            self._accepted += _RECOVERY * (self._promised - self._accepted)
        self._next_promise = promised[best]
        rows = np.array([row for _, row in chances[:best]], dtype=np.int64)
        return np.bincount(rows, minlength=len(drafts)).tolist()

    def _cursor(self, slot: int, num_tokens: int) -> DraftCursor:
        """The cursor of the sequence in this slot; it has read all its tokens."""
        sequence = self._slots.sequence(slot)
        cursor = sequence.cursor
        if cursor is None:
            prompt = self._slots.tokens[slot, : sequence.num_prompt].copy()
            index = self._index_of(sequence.request)
            index.read(prompt)
            cursor = sequence.cursor = DraftCursor(index, prompt)
        if cursor.num_read < num_tokens:
            cursor.read(self._slots.tokens[slot, cursor.num_read : num_tokens].tolist())
        return cursor

    def _index_of(self, request: Request) -> NgramIndex:
        digest = xxhash.xxh3_128_digest(np.ascontiguousarray(request.prompt, dtype="<i4").tobytes())
        key = (request.cache_salt, len(request.prompt), digest)
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = NgramIndex()
            self._grow(index, len(request.prompt))
        self._indexes.move_to_end(key)
        return index

    def _grow(self, index: NgramIndex, num_tokens: int) -> None:
        index.num_tokens += num_tokens
        self.num_known += num_tokens
        while self.num_known > self._max_known and len(self._indexes) > 1:
            _, forgotten = self._indexes.popitem(last=False)
            self.num_known -= forgotten.num_tokens
        if self.num_known > self._max_known:  # of one prompt, which is used all the time
            index.clear()
            self.num_known = 0
