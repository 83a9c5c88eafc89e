"""Sequences without a slot, in order of arrival; a request may skip `priority` queued requests.

While new sequences are held, sequences without a token are set aside without any KV, because they
may start under other weights. The others may hold KV: blocks shared with the sequence that they
forked from, or blocks that they had when they were preempted.

The engine's thread calls everything.
"""

import bisect

from millrace.inference.embedded.kv.blocks import BlockPool
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.scheduling.sequence import Sequence


class WaitQueue:
    def __init__(self, pool: BlockPool, *, prefixes: PrefixCache) -> None:
        self._pool = pool
        self._prefixes = prefixes  # takes over blocks that are no longer held
        self._queue: list[Sequence] = []
        self._held: list[Sequence] = []
        self._holds_new = False

    def __bool__(self) -> bool:
        """True if a sequence may get a slot."""
        return bool(self._queue)

    @property
    def first(self) -> Sequence:
        return self._queue[0]

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences; followers count, as in num_held."""
        return sum(1 + len(sequence.followers) for sequence in self._queue)

    @property
    def num_held(self) -> int:
        return sum(1 + len(sequence.followers) for sequence in self._held)

    def sequences(self) -> list[Sequence]:
        return [*self._queue, *self._held]

    def add(self, sequence: Sequence) -> None:
        queue = self._queue
        if self._holds_new and not sequence.has_begun:
            queue = self._held
            self._drop_held(sequence, ends=True)
            sequence.kv_history = ()
        bisect.insort(queue, sequence, key=lambda other: other.rank)

    def take_first(self) -> Sequence:
        return self._queue.pop(0)

    def remove(self, request_id: str) -> list[Sequence]:
        removed = [s for s in self.sequences() if s.request.id == request_id]
        for sequence in removed:
            self._drop_held(sequence, ends=True)
        self._queue = [s for s in self._queue if s.request.id != request_id]
        self._held = [s for s in self._held if s.request.id != request_id]
        return removed

    def hold_new(self) -> None:
        """From now on, set aside sequences that have not begun."""
        self._holds_new = True
        queue, self._queue = self._queue, []
        for sequence in queue:
            self.add(sequence)

    def release_new(self) -> None:
        self._holds_new = False
        held, self._held = self._held, []
        for sequence in held:
            self.add(sequence)

    def forget_kv(self, *, only_inputs: bool = False) -> None:
        """Drop all held KV, and the right to find it in the prefix cache: the weights changed.
        `only_inputs`: of sequences that have sampled no token here."""
        for sequence in self._queue:
            if only_inputs and len(sequence.tokens) > sequence.num_input:
                continue
            sequence.kv_history = ()
            if sequence.held_blocks is not None:
                self._pool.release(sequence.held_blocks)
                sequence.held_blocks = None

    def drop_latest_held(self) -> bool:
        """Drop the blocks of the latest sequence that holds some; it will prefill by itself."""
        for sequence in reversed(self._queue):
            if sequence.held_blocks is not None:
                self._drop_held(sequence, ends=False)
                return True
        return False

    def _drop_held(self, sequence: Sequence, *, ends: bool) -> None:
        blocks, sequence.held_blocks = sequence.held_blocks, None
        if blocks is not None:
            num_cached = len(sequence.tokens) - 1  # the last token of a preempted one has no KV yet
            self._prefixes.leave(sequence, blocks=blocks, num_cached=num_cached, ends=ends)
