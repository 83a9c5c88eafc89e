"""The running sequences as arrays: one row per slot, so that a step's bookkeeping is vectorised.

C = capacity in tokens, which grows with the longest sequence; N = steps, R = slots of a step,
V = vocabulary. The engine's thread calls everything.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from millrace.core.records import TopTokens
from millrace.inference.embedded.decode.adjustments import LogitChanges
from millrace.inference.embedded.sampler import SamplerOutput, SamplingBatch, stream_key
from millrace.inference.embedded.scheduling.sequence import (
    NO_TOKEN,
    DecodeResult,
    Sampled,
    Sequence,
)
from millrace.models.grammars import GrammarCompiler

_MANY_IDS = 2**18  # kept ids of a launch that threads copy
_NUM_COPIERS = 4
_NO_PLACES = np.empty(0, dtype=np.int64)


class BatchSlots:
    def __init__(self, num_slots: int, *, max_context: int) -> None:
        self.max_context = max_context
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.occupied = np.zeros(num_slots, dtype=bool)
        self.tokens = np.zeros((num_slots, 0), dtype=np.int32)  # [slots, C]
        self.logprobs = np.zeros((num_slots, 0), dtype=np.float32)  # [slots, C]; by token position
        self.versions = np.zeros((num_slots, 0), dtype=np.int32)  # [slots, C]; by token position
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)  # prompt and sampled
        self.num_cached = np.zeros(num_slots, dtype=np.int64)  # of these, in the KV cache
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.leads = np.zeros(num_slots, dtype=bool)  # has followers that wait for its prefill
        self.flows = np.zeros(num_slots, dtype=np.int64)  # of its request
        # Settings that are sent to the device together: the num_tokens that ends the sequence by
        # length, the key of its random stream, top-k, and its slot in the adapter bank.
        self.integers = np.zeros((4, num_slots), dtype=np.int64)
        self.limits, self.keys, self.top_k, self.adapters = self.integers
        self.floats = np.ones((3, num_slots), dtype=np.float32)
        self.temperatures, self.top_p, self.min_p = self.floats
        self.truncates = np.zeros(num_slots, dtype=bool)
        self.has_stop_strings = np.zeros(num_slots, dtype=bool)
        self.is_guided = np.zeros(num_slots, dtype=bool)  # by a grammar
        self.adjusts_logits = np.zeros(num_slots, dtype=bool)  # by penalties or biases
        self.num_top = np.zeros(num_slots, dtype=np.int64)  # likeliest ids to report per token
        self.is_plain = np.ones(num_slots, dtype=bool)  # neither adjusts nor reports
        self._copiers = ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="kept")

    @property
    def num_free(self) -> int:
        return len(self._free)

    def sequence(self, slot: int) -> Sequence:
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence is not None]

    def sampled_by(self, sequence: Sequence) -> Sampled:
        """What a sequence, with or without a slot, has sampled; views."""
        if (slot := sequence.slot) is None:
            return sequence.sampled()
        own = slice(sequence.num_prompt, int(self.num_tokens[slot]))
        return self.tokens[slot, own], self.logprobs[slot, own], self.versions[slot, own]

    def assign(self, sequence: Sequence, *, num_cached: int) -> int:
        assert sequence.slot is None
        slot = self._free.pop()
        request, sampling = sequence.request, sequence.request.sampling
        num_tokens, num_prompt = len(sequence.tokens), sequence.num_prompt
        self._reserve(num_tokens + 1)
        self._sequences[slot] = sequence
        self.occupied[slot] = True
        self.tokens[slot, :num_tokens] = sequence.tokens
        self.logprobs[slot, num_prompt:num_tokens] = sequence.logprobs
        self.versions[slot, num_prompt:num_tokens] = sequence.versions
        self.num_tokens[slot] = num_tokens
        self.num_cached[slot] = num_cached
        self.num_prompt[slot] = num_prompt
        self.leads[slot] = bool(sequence.followers)
        self.flows[slot] = request.flow
        limit = min(num_prompt + sampling.max_new_tokens, self.max_context)
        key = stream_key(request.seed, request.index + sequence.member)
        self.integers[:, slot] = limit, key, sampling.top_k, sequence.adapter_slot
        self.floats[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p
        self.truncates[slot] = sampling.truncates
        self.has_stop_strings[slot] = bool(sampling.stop)
        self.is_guided[slot] = sequence.guide is not None
        self.adjusts_logits[slot] = sampling.adjusts_logits
        self.num_top[slot] = sampling.top_logprobs
        self.is_plain[slot] = not (sampling.adjusts_logits or sampling.top_logprobs)
        sequence.slot = slot
        return slot

    def free(self, sequence: Sequence) -> int:
        """Free the slot; its tokens go to the sequence."""
        slot = sequence.slot
        assert slot is not None
        assert self._sequences[slot] is sequence
        start, stop = sequence.num_prompt, int(self.num_tokens[slot])
        sequence.tokens = self.tokens[slot, :stop].copy()
        sequence.logprobs = self.logprobs[slot, start:stop].copy()
        sequence.versions = self.versions[slot, start:stop].copy()
        sequence.slot = None
        self._sequences[slot] = None
        self.occupied[slot] = False
        self._free.append(slot)
        return slot

    def append(self, slots: np.ndarray, result: DecodeResult, *, version: int | np.ndarray) -> None:
        """Record sampled tokens; all tokens but the last of each slot [R] are cached. `version`: of
        all slots, or [R]."""
        at, counts = self.num_tokens[slots], result.counts
        self._reserve(int((at + counts).max()))
        step, row = np.nonzero(np.arange(len(result.tokens))[:, None] < counts)
        slot, position = slots[row], at[row] + step
        self.tokens[slot, position] = result.tokens[step, row]
        self.logprobs[slot, position] = result.logprobs[step, row]
        self.versions[slot, position] = np.broadcast_to(version, len(slots))[row]
        self.num_tokens[slots] = at + counts
        self.num_cached[slots] = at + counts - 1
        if result.kept is not None and result.num_kept is not None:
            self._append_kept(slots, counts, ids=result.kept, num_kept=result.num_kept)
        if result.top is not None:
            self._append_top(slots, counts, *result.top)

    def _append_kept(
        self, slots: np.ndarray, counts: np.ndarray, *, ids: np.ndarray, num_kept: np.ndarray
    ) -> None:
        """Record the ids that tokens were drawn from; many are copied while the device works."""
        starts = np.concatenate([[0], num_kept.sum(1).cumsum()])
        copiers = self._copiers if len(ids) >= _MANY_IDS else None
        for row in np.flatnonzero(self.truncates[slots]):
            sizes = num_kept[row, : counts[row]].astype(np.int64)
            own = ids[starts[row] : starts[row] + sizes.sum()]
            kept = self.sequence(slots[row]).kept
            assert kept is not None
            kept.append(own, sizes=sizes, copiers=copiers)

    def put_drafts(self, slots: np.ndarray, drafts: list[list[int]]) -> None:
        """Write the drafts of these slots [R] behind their tokens."""
        for slot, draft in zip(slots.tolist(), drafts, strict=True):
            start = int(self.num_tokens[slot])
            self._reserve(start + len(draft))
            self.tokens[slot, start : start + len(draft)] = draft

    def _append_top(
        self, slots: np.ndarray, counts: np.ndarray, ids: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Record the likeliest ids [N, R or fewer, K], one array per token, of slots that report
        them."""
        for row in np.flatnonzero(self.num_top[slots]):
            top, num_top = self.sequence(slots[row]).top, int(self.num_top[slots[row]])
            for step in range(counts[row]):
                own = slice(step, step + 1), row, slice(num_top)
                top.append(TopTokens(ids=ids[own], logprobs=logprobs[own]))

    def sampling_batch(
        self,
        slots: np.ndarray,
        *,
        vocab_size: int,
        device: torch.device,
        ahead: np.ndarray | int = 0,
    ) -> SamplingBatch:
        """`ahead` [R]: how many tokens lie between the last known one and the one to draw."""
        top_k, top_p, truncates = self.top_k[slots], self.top_p[slots], self.truncates[slots]
        num_ordered = 0
        if any_truncates := bool(truncates.any()):
            ordered = np.where(top_k > 0, top_k, np.where(top_p < 1.0, vocab_size, 0))
            num_ordered = min(int(ordered[truncates].max()), vocab_size)
        positions = torch.from_numpy(self.num_tokens[slots] - self.num_prompt[slots] + ahead)
        # take() and not [:, slots], whose rows would not be contiguous, as kernels need them.
        integers = torch.from_numpy(self.integers.take(slots, axis=1)).to(device)
        floats = torch.from_numpy(self.floats.take(slots, axis=1)).to(device)
        return SamplingBatch.of(
            integers,
            floats,
            positions=positions.to(device),
            any_greedy=not self.temperatures[slots].all(),
            all_greedy=not self.temperatures[slots].any(),
            any_truncates=any_truncates,
            num_ordered=num_ordered,
        )

    def _reserve(self, num_tokens: int) -> None:
        capacity = self.tokens.shape[1]
        if num_tokens <= capacity:
            return
        extra = min(max(2 * capacity, num_tokens, 64), self.max_context) - capacity
        assert capacity + extra >= num_tokens, "a sequence never outgrows the context"
        pad = ((0, 0), (0, extra))
        arrays = (self.tokens, self.logprobs, self.versions)
        self.tokens, self.logprobs, self.versions = (np.pad(array, pad) for array in arrays)

    def grammar_masks(
        self, slots: np.ndarray, grammars: GrammarCompiler, *, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The ids that grammars allow as the next token of these slots [R], [R, V / 32] int32."""
        sequences = [self.sequence(slot) for slot in slots]
        sampled = [self.sampled_by(sequence)[0] for sequence in sequences]
        return grammars.masks([sequence.guide for sequence in sequences], sampled, out=out)

    def logit_changes(
        self, slots: np.ndarray, *, vocab_size: int, num_rows: int | None = None
    ) -> LogitChanges:
        """The penalties and biases of these slots [R], for `num_rows` rows that begin with theirs;
        a slot without any has the changes of a plain row."""
        penalties = np.zeros((2, num_rows or len(slots)), dtype=np.float32)
        sampled, biased, biases = [_NO_PLACES], [_NO_PLACES], np.empty(0, dtype=np.float32)
        for row in np.flatnonzero(self.adjusts_logits[slots]):
            sequence = self.sequence(slots[row])
            sampling, first = sequence.request.sampling, row * vocab_size
            penalties[:, row] = sampling.presence_penalty, sampling.frequency_penalty
            sampled.append(first + self.sampled_by(sequence)[0].astype(np.int64))
            own = dict(sampling.logit_bias)
            biased.append(first + np.array(list(own), dtype=np.int64))
            biases = np.append(biases, np.array(list(own.values()), dtype=np.float32))
        return LogitChanges(np.concatenate(sampled), np.concatenate(biased), biases, penalties)


def within(counts: np.ndarray) -> np.ndarray:
    """0..count-1 of each row, one row after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def decode_result(drawn: SamplerOutput, counts: np.ndarray) -> DecodeResult:
    """The tokens that `counts` [R] rows of each slot drew, slot after slot."""
    row, step = np.repeat(np.arange(len(counts)), counts), within(counts)
    tokens = np.full((counts.max(), len(counts)), NO_TOKEN, dtype=np.int32)
    logprobs = np.zeros(tokens.shape, dtype=np.float32)
    tokens[step, row] = drawn.tokens.cpu().numpy()
    logprobs[step, row] = drawn.logprobs.cpu().numpy()
    kept = num_kept = top = None
    if drawn.kept is not None:
        kept = drawn.kept.ids.to(torch.int32).cpu().numpy()
        num_kept = np.zeros(tokens.T.shape, dtype=np.int32)
        num_kept[row, step] = drawn.kept.offsets.diff().cpu().numpy()
    if drawn.top is not None:
        found = [part.cpu().numpy() for part in drawn.top]
        ids, top_logprobs = (np.zeros((*tokens.shape, *p.shape[1:]), dtype=p.dtype) for p in found)
        ids[step, row], top_logprobs[step, row] = found
        top = ids, top_logprobs
    return DecodeResult(tokens, logprobs, counts, kept, num_kept, top)
