"""The sequences without a lane, in the order of their arrival; a request may overtake some others.

While new ones are held back, those that have no token yet stand aside, without any KV: it may be
long until it is their turn, and the weights will be others then. The rest may hold KV: blocks that
they share with the sequence they forked from, or had when they were parked.

Called by the engine's thread.
"""

import bisect

from millrace.inference.embedded.kv.blocks import BlockPool
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.scheduling.sequence import Sequence


class WaitQueue:
    def __init__(self, pool: BlockPool, *, prefixes: PrefixCache) -> None:
        self._pool = pool
        self._prefixes = prefixes  # takes over what is no longer held
        self._line: list[Sequence] = []
        self._aside: list[Sequence] = []
        self._holds_new = False

    def __bool__(self) -> bool:
        """True if someone may be seated."""
        return bool(self._line)

    @property
    def first(self) -> Sequence:
        return self._line[0]

    @property
    def num_waiting(self) -> int:
        """With followers; as below."""
        return sum(1 + len(sequence.followers) for sequence in self._line)

    @property
    def num_held_back(self) -> int:
        return sum(1 + len(sequence.followers) for sequence in self._aside)

    def sequences(self) -> list[Sequence]:
        return [*self._line, *self._aside]

    def add(self, sequence: Sequence) -> None:
        line = self._line
        if self._holds_new and not sequence.has_begun:
            line = self._aside
            self._drop_held(sequence, ends=True)
            sequence.lineage = ()
        bisect.insort(
            line, sequence, key=lambda waiting: waiting.arrival - waiting.request.priority
        )

    def take_first(self) -> Sequence:
        """Takes it out."""
        return self._line.pop(0)

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all sequences of a request out."""
        removed = [s for s in self.sequences() if s.request.id == request_id]
        for sequence in removed:
            self._drop_held(sequence, ends=True)
        self._line = [s for s in self._line if s.request.id != request_id]
        self._aside = [s for s in self._aside if s.request.id != request_id]
        return removed

    def hold_new(self) -> None:
        """From now on, let no sequence be seated that has not begun."""
        self._holds_new = True
        line, self._line = self._line, []
        for sequence in line:
            self.add(sequence)

    def release_new(self) -> None:
        """Undo hold_new()."""
        self._holds_new = False
        aside, self._aside = self._aside, []
        for sequence in aside:
            self.add(sequence)

    def forget_kv(self) -> None:
        """What they hold belongs to other weights, nor may they find what they left behind."""
        for sequence in self._line:
            sequence.lineage = ()
            if sequence.held_blocks is not None:
                self._pool.release(sequence.held_blocks)
                sequence.held_blocks = None

    def drop_latest_held(self) -> bool:
        """Give up the latest held prefix, if there is one; its sequence will prefill by itself."""
        for sequence in reversed(self._line):
            if sequence.held_blocks is not None:
                self._drop_held(sequence, ends=False)
                return True
        return False

    def _drop_held(self, sequence: Sequence, *, ends: bool) -> None:
        blocks, sequence.held_blocks = sequence.held_blocks, None
        if blocks is not None:
            num_cached = len(sequence.tokens) - 1  # a parked one's last token has not run yet
            self._prefixes.leave(sequence, blocks=blocks, num_cached=num_cached, ends=ends)
