"""Free blocks whose contents may be wanted again, in the order in which they are given up.

A block is put here when nobody references it any more, and taken when its contents are found again
or when its memory is needed. Least recently put goes first, except that what was put before the
last swap goes before everything else: no request under the new weights would find it. Blocks put
as `lasting` are those that one would find, and stay in line.

A block costs a dictionary entry, a swap nothing: both happen while decoding waits.
Called by the engine's thread.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

Shelf = OrderedDict[int, int]  # block -> when it was put; oldest first


class FreeBlockLRU:
    def __init__(self) -> None:
        self._passing = Shelf()
        self._lasting = Shelf()
        self._expired: deque[Shelf] = deque()
        self._num_puts = 0
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def put(self, blocks: Sequence[int], *, lasting: bool) -> None:
        """The first of these is given up first."""
        shelf = self._lasting if lasting else self._passing
        for time, block in enumerate(blocks, start=self._num_puts):
            shelf[block] = time
        self._num_puts += len(blocks)
        self._num_blocks += len(blocks)

    def take(self, blocks: Iterable[int]) -> None:
        """These are referenced again."""
        for block in blocks:
            shelves = (self._passing, self._lasting, *self._expired)
            shelf = next((shelf for shelf in shelves if block in shelf), None)
            assert shelf is not None, f"a free block cannot be shared: {block} holds nothing"
            del shelf[block]
            self._num_blocks -= 1

    def give_up(self, count: int) -> list[int]:
        """Take the `count` blocks that are least worth keeping."""
        self._num_blocks -= count
        return [self._least_shelf().popitem(last=False)[0] for _ in range(count)]

    def expire(self) -> None:
        """The weights changed."""
        self._expired.append(self._passing)
        self._passing = Shelf()
        self._expired = deque(shelf for shelf in self._expired if shelf)

    def _least_shelf(self) -> Shelf:
        while self._expired:
            if self._expired[0]:
                return self._expired[0]
            self._expired.popleft()
        if not (self._passing and self._lasting):
            return self._passing or self._lasting
        passing, lasting = (next(iter(shelf.values())) for shelf in (self._passing, self._lasting))
        return self._passing if passing < lasting else self._lasting
