"""When a completion ends, and the text it leaves.

An eos token or a stop string ends it with "stop"; max_new_tokens or the context's end, "length".
The tokens keep everything that was sampled; the text leaves out the eos token and what begins with
the stop string.
"""

from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

from millrace.core.records import Finish
from millrace.inference.embedded.decode.loop import DecodeResult
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import Sequence

# Tokens at the cut of a tail may decode differently than in place (half a character, a lost space).
_TAIL_MARGIN = 4


class StopRules:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)

    def is_eos(self, tokens: np.ndarray) -> np.ndarray:
        """[N] bool for tokens [N]."""
        return (tokens[:, None] == self._eos_ids).any(axis=1)

    def ends_in_stop_string(self, sampled: np.ndarray, stop: tuple[str, ...]) -> bool:
        """True if the sampled tokens [N], checked after each of them, now contain a stop string."""
        # A token decodes to at least one byte, so no stop string reaches back further than this.
        reach = max(len(text.encode()) for text in stop) + _TAIL_MARGIN
        tail = self._decode(sampled[-reach:])
        if not any(text in tail for text in stop):
            return False
        whole = tail if len(sampled) <= reach else self._decode(sampled)
        return any(text in whole for text in stop)

    def text(self, sampled: np.ndarray, stop: tuple[str, ...]) -> str:
        """The sampled tokens [N] as text, up to the first stop string."""
        if len(sampled) and self.is_eos(sampled[-1:])[0]:
            sampled = sampled[:-1]
        text = self._decode(sampled)
        ends = [at for at in (text.find(s) for s in stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def _decode(self, tokens: np.ndarray) -> str:
        # Special tokens stay in: a stop string may well be one.
        text = self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopChecker:
    def __init__(self, slots: BatchSlots, stopping: StopRules) -> None:
        self._slots = slots
        self._stopping = stopping
        self._expired_before = 0  # older tokens can no longer be trained

    def expire(self, before: int) -> None:
        """Tokens of older versions than this are too old from now on."""
        self._expired_before = max(before, self._expired_before)

    def finished_in(self, slots: np.ndarray) -> list[tuple[Sequence, Finish]]:
        """The sequences in these slots whose newest token was their last."""
        num_tokens = self._slots.num_tokens[slots]
        stopped = self._stopping.is_eos(self._slots.tokens[slots, num_tokens - 1])
        for row in np.flatnonzero(self._slots.has_stop_strings[slots] & ~stopped):
            stopped[row] = self._ends_in_stop_string(slots[row], self._sampled(slots[row]))
        ended = stopped | (num_tokens >= self._slots.limits[slots])
        return [
            (self._slots.sequence(slots[row]), "stop" if stopped[row] else "length")
            for row in np.flatnonzero(ended)
        ]

    def counts_until_stop(self, slots: np.ndarray, result: DecodeResult) -> np.ndarray:
        """[R] how many of each slot's new tokens count: none that come after a stop string."""
        counts = result.counts.copy()
        for row in np.flatnonzero(self._slots.has_stop_strings[slots]):
            earlier = self._sampled(slots[row])
            sampled = np.concatenate([earlier, result.tokens[: counts[row], row]])
            for count in range(1, counts[row] + 1):
                if self._ends_in_stop_string(slots[row], sampled[: len(earlier) + count]):
                    counts[row] = count
                    break
        return counts

    def finish_on_arrival(self, sequence: Sequence) -> Finish | None:
        """How a completion had ended already when it came, if it had."""
        sampled, sampling = sequence.tokens[sequence.num_prompt :], sequence.request.sampling
        if len(sampled) and self._stopping.is_eos(sampled[-1:])[0]:
            return "stop"
        if sampling.stop and self._stopping.ends_in_stop_string(sampled, sampling.stop):
            return "stop"
        at_limit = len(sampled) >= sampling.max_new_tokens
        if at_limit or len(sequence.tokens) >= self._slots.max_context:
            return "length"
        is_old = (sequence.versions < self._expired_before).any()
        return "expire" if is_old and sequence.request.expires else None

    def _sampled(self, slot: int) -> np.ndarray:
        """[N] tokens of the sequence in this slot."""
        return self._slots.tokens[slot, self._slots.num_prompt[slot] : self._slots.num_tokens[slot]]

    def _ends_in_stop_string(self, slot: int, sampled: np.ndarray) -> bool:
        stop = self._slots.sequence(slot).request.sampling.stop
        return self._stopping.ends_in_stop_string(sampled, stop)
