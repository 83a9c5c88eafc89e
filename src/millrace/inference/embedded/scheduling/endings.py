"""Which sequences have come to their end, and how.

The newest token may be an eos token or complete a stop string ("stop"), or be the last that
max_new_tokens or the context allows ("length"). A completion that is resumed may have ended before
it came, or have tokens that are too old by now ("expire"). Called by the engine's thread.
"""

import numpy as np

from millrace.core.records import Finish
from millrace.inference.embedded.decode.loop import RoundResult
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import Sequence
from millrace.inference.embedded.scheduling.stopping import Stopping


class Endings:
    def __init__(self, lanes: BatchSlots, stopping: Stopping) -> None:
        self._lanes = lanes
        self._stopping = stopping
        self._expired_before = 0  # older tokens can no longer be trained

    def expire(self, before: int) -> None:
        """Tokens of older versions than this are too old from now on."""
        self._expired_before = max(before, self._expired_before)

    def among(self, lanes: np.ndarray) -> list[tuple[Sequence, Finish]]:
        """The sequences in these lanes whose newest token was their last."""
        num_tokens = self._lanes.num_tokens[lanes]
        stopped = self._stopping.is_eos(self._lanes.tokens[lanes, num_tokens - 1])
        for row in np.flatnonzero(self._lanes.has_stop_strings[lanes] & ~stopped):
            stopped[row] = self._ends_in_stop_string(lanes[row], self._sampled(lanes[row]))
        ended = stopped | (num_tokens >= self._lanes.limits[lanes])
        return [
            (self._lanes.sequence(lanes[row]), "stop" if stopped[row] else "length")
            for row in np.flatnonzero(ended)
        ]

    def until_stop_string(self, lanes: np.ndarray, result: RoundResult) -> np.ndarray:
        """[R] how many of each lane's new tokens count: none that come after a stop string."""
        counts = result.counts.copy()
        for row in np.flatnonzero(self._lanes.has_stop_strings[lanes]):
            earlier = self._sampled(lanes[row])
            sampled = np.concatenate([earlier, result.tokens[: counts[row], row]])
            for count in range(1, counts[row] + 1):
                if self._ends_in_stop_string(lanes[row], sampled[: len(earlier) + count]):
                    counts[row] = count
                    break
        return counts

    def of_resumed(self, sequence: Sequence) -> Finish | None:
        """How a completion had ended already when it came, if it had."""
        sampled, sampling = sequence.tokens[sequence.num_prompt :], sequence.request.sampling
        if len(sampled) and self._stopping.is_eos(sampled[-1:])[0]:
            return "stop"
        if sampling.stop and self._stopping.ends_in_stop_string(sampled, sampling.stop):
            return "stop"
        at_limit = len(sampled) >= sampling.max_new_tokens
        if at_limit or len(sequence.tokens) >= self._lanes.max_context:
            return "length"
        is_old = (sequence.versions < self._expired_before).any()
        return "expire" if is_old and sequence.request.expires else None

    def _sampled(self, lane: int) -> np.ndarray:
        """[N] tokens of the sequence in this lane."""
        return self._lanes.tokens[lane, self._lanes.num_prompt[lane] : self._lanes.num_tokens[lane]]

    def _ends_in_stop_string(self, lane: int, sampled: np.ndarray) -> bool:
        stop = self._lanes.sequence(lane).request.sampling.stop
        return self._stopping.ends_in_stop_string(sampled, stop)
