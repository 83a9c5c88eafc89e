"""The running sequences as arrays: one row per lane, so that a step's bookkeeping is vectorised.

C = capacity in tokens, which grows with the longest sequence. Called by the engine's thread.

What grammars rule out of the logits, for the lanes that have one.

R = lanes of a step, V = vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.sampling.random import stream_key
from millrace.inference.embedded.sampling.sampler import SamplingRows
from millrace.inference.embedded.scheduling.sequence import Sequence


class BatchSlots:
    def __init__(self, num_lanes: int, *, max_context: int) -> None:
        self.max_context = max_context
        self._sequences: list[Sequence | None] = [None] * num_lanes
        self._free = list(range(num_lanes - 1, -1, -1))
        self.occupied = np.zeros(num_lanes, dtype=bool)
        self.tokens = np.zeros((num_lanes, 0), dtype=np.int32)  # [lanes, C]
        self.logprobs = np.zeros((num_lanes, 0), dtype=np.float32)  # [lanes, C]; by token position
        self.versions = np.zeros((num_lanes, 0), dtype=np.int32)  # [lanes, C]; by token position
        self.num_tokens = np.zeros(num_lanes, dtype=np.int64)  # prompt and sampled
        self.num_cached = np.zeros(num_lanes, dtype=np.int64)  # of these, in the KV cache
        self.num_prompt = np.zeros(num_lanes, dtype=np.int64)
        self.limits = np.zeros(num_lanes, dtype=np.int64)  # num_tokens that ends it by length
        self.leads = np.zeros(num_lanes, dtype=bool)  # others wait for its prefill
        self.adapters = np.zeros(num_lanes, dtype=np.int64)  # slots of the adapter bank
        self.keys = np.zeros(num_lanes, dtype=np.int64)  # of its random stream
        self.temperatures = np.ones(num_lanes, dtype=np.float32)
        self.top_k = np.zeros(num_lanes, dtype=np.int64)
        self.top_p = np.ones(num_lanes, dtype=np.float32)
        self.min_p = np.zeros(num_lanes, dtype=np.float32)
        self.truncates = np.zeros(num_lanes, dtype=bool)
        self.has_stop_strings = np.zeros(num_lanes, dtype=bool)
        self.is_guided = np.zeros(num_lanes, dtype=bool)  # by a grammar

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def any_guided(self) -> bool:
        return bool((self.occupied & self.is_guided).any())

    def sequence(self, lane: int) -> Sequence:
        sequence = self._sequences[lane]
        assert sequence is not None, f"lane {lane} is empty"
        return sequence

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence is not None]

    def sampled_by(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[N] tokens, logprobs and versions that it has sampled, in a lane or not; views."""
        start, lane = sequence.num_prompt, sequence.lane
        if lane is None:
            return sequence.tokens[start:], sequence.logprobs, sequence.versions
        own = slice(start, int(self.num_tokens[lane]))
        return self.tokens[lane, own], self.logprobs[lane, own], self.versions[lane, own]

    def seat(self, sequence: Sequence, *, num_cached: int) -> int:
        """Give a sequence a free lane."""
        assert sequence.lane is None
        lane = self._free.pop()
        request, sampling = sequence.request, sequence.request.sampling
        num_tokens, num_prompt = len(sequence.tokens), sequence.num_prompt
        self._reserve(num_tokens + 1)
        self._sequences[lane] = sequence
        self.occupied[lane] = True
        self.tokens[lane, :num_tokens] = sequence.tokens
        self.logprobs[lane, num_prompt:num_tokens] = sequence.logprobs
        self.versions[lane, num_prompt:num_tokens] = sequence.versions
        self.num_tokens[lane] = num_tokens
        self.num_cached[lane] = num_cached
        self.num_prompt[lane] = num_prompt
        self.limits[lane] = min(num_prompt + sampling.max_new_tokens, self.max_context)
        self.leads[lane] = bool(sequence.followers)
        self.adapters[lane] = sequence.adapter_slot
        self.keys[lane] = stream_key(request.seed, request.index + sequence.member)
        self.temperatures[lane] = sampling.temperature
        self.top_k[lane] = sampling.top_k
        self.top_p[lane] = sampling.top_p
        self.min_p[lane] = sampling.min_p
        self.truncates[lane] = sampling.truncates
        self.has_stop_strings[lane] = bool(sampling.stop)
        self.is_guided[lane] = sequence.guide is not None
        sequence.lane = lane
        return lane

    def unseat(self, sequence: Sequence) -> int:
        """Take the lane away; the sequence keeps what was sampled in it."""
        lane = sequence.lane
        assert lane is not None
        assert self._sequences[lane] is sequence
        start, stop = sequence.num_prompt, int(self.num_tokens[lane])
        sequence.tokens = self.tokens[lane, :stop].copy()
        sequence.logprobs = self.logprobs[lane, start:stop].copy()
        sequence.versions = self.versions[lane, start:stop].copy()
        sequence.lane = None
        self._sequences[lane] = None
        self.occupied[lane] = False
        self._free.append(lane)
        return lane

    def append(
        self, lanes: np.ndarray, *, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """Record one sampled token in each of these lanes."""
        at = self.num_tokens[lanes]
        self._reserve(int(at.max()) + 1)
        self.tokens[lanes, at] = tokens
        self.logprobs[lanes, at] = logprobs
        self.versions[lanes, at] = version
        self.num_tokens[lanes] = at + 1

    def append_round(
        self,
        lanes: np.ndarray,  # [R]
        *,
        tokens: np.ndarray,  # [N, R]
        logprobs: np.ndarray,  # [N, R]
        counts: np.ndarray,  # [R]; of each lane, the first so many are recorded
        version: int,
    ) -> None:
        """Record what a round sampled, and that all but the last of it is cached."""
        at = self.num_tokens[lanes]
        self._reserve(int((at + counts).max()))
        step, row = np.nonzero(np.arange(len(tokens))[:, None] < counts)
        lane, place = lanes[row], at[row] + step
        self.tokens[lane, place] = tokens[step, row]
        self.logprobs[lane, place] = logprobs[step, row]
        self.versions[lane, place] = version
        self.num_tokens[lanes] = at + counts
        self.num_cached[lanes] += counts

    def keep(self, lanes: np.ndarray, *, ids: np.ndarray, offsets: list[int]) -> None:
        """Record the ids that one token of each of these lanes was drawn from, row by row."""
        for row in np.flatnonzero(self.truncates[lanes]):
            # A copy: a view would keep the ids of the whole batch alive.
            own = ids[offsets[row] : offsets[row + 1]].copy()
            self.sequence(lanes[row]).kept.append(own, sizes=np.array([len(own)]))

    def keep_round(
        self,
        lanes: np.ndarray,  # [R]
        *,
        ids: np.ndarray,  # lane after lane, and in each step after step
        num_kept: np.ndarray,  # [R, N]
        counts: np.ndarray,  # [R]; of each lane, the first so many steps are recorded
    ) -> None:
        """Record the ids that the tokens of a round were drawn from."""
        starts = np.concatenate([[0], num_kept.sum(1).cumsum()])
        for row in np.flatnonzero(self.truncates[lanes]):
            sizes = num_kept[row, : counts[row]].astype(np.int64)
            own = ids[starts[row] : starts[row] + sizes.sum()].copy()
            self.sequence(lanes[row]).kept.append(own, sizes=sizes)

    def sampling_rows(
        self, lanes: np.ndarray, *, vocab_size: int, device: torch.device
    ) -> SamplingRows:
        """How to draw the next token of each of these lanes."""
        temperatures, truncates = self.temperatures[lanes], self.truncates[lanes]
        top_k, top_p = self.top_k[lanes], self.top_p[lanes]
        num_ordered = 0
        if any_truncates := bool(truncates.any()):
            ordered = np.where(top_k > 0, top_k, np.where(top_p < 1.0, vocab_size, 0))
            num_ordered = min(int(ordered[truncates].max()), vocab_size)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return SamplingRows(
            temperatures=on_device(temperatures),
            top_k=on_device(top_k),
            top_p=on_device(top_p),
            min_p=on_device(self.min_p[lanes]),
            keys=on_device(self.keys[lanes]),
            positions=on_device(self.num_tokens[lanes] - self.num_prompt[lanes]),
            any_greedy=not temperatures.all(),
            all_greedy=not temperatures.any(),
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
        self.tokens = np.pad(self.tokens, pad)
        self.logprobs = np.pad(self.logprobs, pad)
        self.versions = np.pad(self.versions, pad)


def guided(logits: Tensor, lanes: BatchSlots, chosen: np.ndarray) -> Tensor:
    """Logits [R, V] of these lanes [R], -inf where a grammar allows nothing."""
    allowed = np.ones(tuple(logits.shape), dtype=bool)
    for row in np.flatnonzero(lanes.is_guided[chosen]):
        sequence = lanes.sequence(chosen[row])
        assert sequence.guide is not None
        sampled, _, _ = lanes.sampled_by(sequence)
        allowed[row] = sequence.guide.allowed(sampled)
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
