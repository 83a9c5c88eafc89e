"""Free blocks whose contents may be wanted again, in the order in which they are given up.

A block is put here when nobody references it any more, and taken when its contents are found again
or when its memory is needed. Least recently put goes first, except that what was put before the
last swap goes before everything else: no request under the new weights would find it. Blocks put
as `lasting` are those that one would find, and stay in line.

Everything is O(1) per block, a swap too. Called by the engine's thread.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

Shelf = OrderedDict[int, int]  # block -> when it was put; oldest first


class Shelves:
    def __init__(self, num_blocks: int) -> None:
        self._passing = Shelf()
        self._lasting = Shelf()
        self._expired: deque[Shelf] = deque()
        self._shelf_of: list[Shelf | None] = [None] * num_blocks
        self._num_puts = 0
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        return self._shelf_of[block] is not None

    def put(self, blocks: Iterable[int], *, lasting: bool) -> None:
        """The first of these is given up first."""
        shelf = self._lasting if lasting else self._passing
        for block in blocks:
            assert self._shelf_of[block] is None, f"block {block} is here already"
            self._num_puts += 1
            self._num_blocks += 1
            shelf[block] = self._num_puts
            self._shelf_of[block] = shelf

    def take(self, blocks: Iterable[int]) -> None:
        """These are referenced again."""
        for block in blocks:
            shelf = self._shelf_of[block]
            assert shelf is not None, f"a free block cannot be shared: {block} holds nothing"
            del shelf[block]
            self._shelf_of[block] = None
            self._num_blocks -= 1

    def give_up(self, count: int) -> list[int]:
        """Take the `count` blocks that are least worth keeping."""
        given = []
        for _ in range(count):
            block, _ = self._least_shelf().popitem(last=False)
            self._shelf_of[block] = None
            given.append(block)
        self._num_blocks -= count
        return given

    def expire(self) -> None:
        """The weights changed."""
        if self._passing:
            self._expired.append(self._passing)
            self._passing = Shelf()

    def _least_shelf(self) -> Shelf:
        while self._expired:
            if self._expired[0]:
                return self._expired[0]
            self._expired.popleft()
        shelves = [shelf for shelf in (self._passing, self._lasting) if shelf]
        return min(shelves, key=lambda shelf: next(iter(shelf.values())))
