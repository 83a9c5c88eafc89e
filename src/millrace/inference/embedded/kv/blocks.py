"""Ownership of KV blocks: a pool of reference-counted blocks, and one block table per batch slot.

Promise: a block is either free or referenced. The reference count equals the number of tables and
held prefixes that name the block. A block that more than one of them names is never written to. A
free block is unused or reusable: a reusable block keeps its contents until it is allocated, and may
be shared again before that.

Host side only (numpy); kv/cache.py holds the tensors. The engine's thread calls everything here.
"""

import itertools
from collections import OrderedDict

import numpy as np


class FreeBlockLRU:
    """Free blocks with reusable contents, in eviction order: least recently put first. Blocks put
    before the last weight swap go before all others, because no request under the new weights would
    find them. Blocks that survive swaps keep their place: a session may find them. A block costs a
    dictionary entry and a swap costs nothing, because decoding waits for both."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._clock = itertools.count()
        # Each queue maps blocks to the time when they were put, oldest first.
        self._across_swaps = OrderedDict[int, int]()
        self._until_swap = [OrderedDict[int, int]()]  # one per swap; the served weights' is last

    def __len__(self) -> int:
        return self._num_blocks

    def put(self, blocks: list[int], *, survives_swaps: bool) -> None:
        """Add blocks; the first is evicted first."""
        queue = self._across_swaps if survives_swaps else self._until_swap[-1]
        queue.update(zip(blocks, self._clock, strict=False))
        self._num_blocks += len(blocks)

    def remove(self, blocks: list[int]) -> None:
        """Take out blocks that are referenced again."""
        for block in blocks:
            queues = (self._across_swaps, *reversed(self._until_swap))
            queue = next((queue for queue in queues if block in queue), None)
            assert queue is not None, f"a free block cannot be shared: {block} holds nothing"
            del queue[block]
        self._num_blocks -= len(blocks)

    def evict(self) -> int:
        """Take out the next block in eviction order."""
        *expired, newest = self._until_swap
        live = [queue for queue in (newest, self._across_swaps) if queue]
        queue = next(filter(None, expired), None) or min(live, key=lambda q: next(iter(q.values())))
        self._num_blocks -= 1
        return queue.popitem(last=False)[0]

    def expire(self) -> None:
        """The weights changed: evict what does not survive swaps first."""
        self._until_swap = [*filter(None, self._until_swap), OrderedDict[int, int]()]


class BlockPool:
    """Reference counts of `num_blocks` blocks, and those that are free."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)  # a stack; top = last
        self._num_unused = num_blocks
        self._reusable = FreeBlockLRU()
        self._survives_swaps = np.zeros(num_blocks, dtype=bool)  # see release_reusable()
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self.content_ids = np.zeros(num_blocks, dtype=np.int64)  # change when the contents do

    @property
    def num_free(self) -> int:
        return self._num_unused + len(self._reusable)

    def allocate(self, count: int) -> np.ndarray:
        """[count] block numbers, each with one reference; their old contents are gone."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        if count > self._num_unused:
            evicted = [self._reusable.evict() for _ in range(count - self._num_unused)]
            self._discard(np.array(evicted, dtype=np.int64))
        blocks = self._unused[self._num_unused - count : self._num_unused].copy()
        self._num_unused -= count
        self.references[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """Add a reference to each of these distinct blocks, referenced or reusable."""
        self._reusable.remove(blocks[self.references[blocks] == 0].tolist())
        self.references[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """Remove a reference from each of these distinct blocks. A block without references is
        unused, or reusable if its contents survive swaps."""
        idle = self._unreference(blocks)
        survives = self._survives_swaps[idle]
        self._reusable.put(idle[survives][::-1].tolist(), survives_swaps=True)
        self._discard(idle[~survives])

    def release_reusable(self, blocks: np.ndarray, *, survives_swaps: bool) -> None:
        """Like release(), but blocks without a reference keep their contents for reuse. `blocks`
        are in token order. The last ones are useless without the first, so they are evicted
        first."""
        if survives_swaps:
            self._survives_swaps[blocks] = True
        idle = self._unreference(blocks)[::-1]
        survives = self._survives_swaps[idle]
        self._reusable.put(idle[~survives].tolist(), survives_swaps=False)
        self._reusable.put(idle[survives].tolist(), survives_swaps=True)

    def forget_reusable(self) -> None:
        """The contents of free blocks are lost."""
        lost = [self._reusable.evict() for _ in range(len(self._reusable))]
        self._discard(np.array(lost, dtype=np.int64))

    def expire(self) -> None:
        """The weights changed; see FreeBlockLRU.expire()."""
        self._reusable.expire()

    def _unreference(self, blocks: np.ndarray) -> np.ndarray:
        """Returns the blocks that have no reference left."""
        assert (self.references[blocks] > 0).all(), "a free block cannot be released"
        self.references[blocks] -= 1
        return blocks[self.references[blocks] == 0]

    def _discard(self, blocks: np.ndarray) -> None:
        self.content_ids[blocks] += 1
        self._survives_swaps[blocks] = False
        self._unused[self._num_unused : self._num_unused + len(blocks)] = blocks
        self._num_unused += len(blocks)


class BlockTables:
    """The blocks of each slot, in the order of its tokens."""

    def __init__(
        self, pool: BlockPool, *, num_slots: int, max_context: int, block_tokens: int
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        # Unused entries are 0: a valid block, so that padded gathers need no special case.
        self.rows = np.zeros((num_slots, -(-max_context // block_tokens)), dtype=np.int64)
        self.sizes = np.zeros(num_slots, dtype=np.int64)  # blocks in use, per slot

    def kv_slots(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """KV slots of these tokens, [T] each."""
        blocks = self.rows[slots, positions // self.block_tokens]
        return blocks * self.block_tokens + positions % self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def assign(self, slot: int, blocks: np.ndarray) -> None:
        """Give an empty slot these blocks, with the caller's reference to each."""
        assert self.sizes[slot] == 0, f"slot {slot} already has blocks"
        self.rows[slot, : len(blocks)] = blocks
        self.sizes[slot] = len(blocks)

    def has_room(self, slots: np.ndarray, *, positions: np.ndarray, num_tokens: np.ndarray) -> bool:
        """True if there are blocks for these slots to write from `positions` up to num_tokens."""
        sizes = np.maximum(self.sizes[slots], positions // self.block_tokens + 1)
        further = np.maximum(-(-num_tokens // self.block_tokens) - sizes, 0)
        return self.blocks_to_write(slots, positions) + further.sum() <= self.pool.num_free

    def extend(self, slots: np.ndarray, *, num_tokens: np.ndarray) -> None:
        """Allocate the blocks that each of these slots lacks to hold its num_tokens."""
        sizes, wanted = self.sizes[slots], -(-num_tokens // self.block_tokens)
        lacking = np.maximum(wanted - sizes, 0)
        rows = np.repeat(slots, lacking)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(lacking) - lacking, lacking)
        self.rows[rows, np.repeat(sizes, lacking) + within] = self.pool.allocate(len(rows))
        self.sizes[slots] = sizes + lacking

    def share(self, slot: int) -> np.ndarray:
        """All blocks of the slot, with a new reference to each for the caller."""
        blocks = self.rows[slot, : self.sizes[slot]].copy()
        self.pool.share(blocks)
        return blocks

    def take(self, slot: int) -> np.ndarray:
        """Empty the slot; the caller gets its blocks with their references."""
        size = self.sizes[slot]
        blocks = self.rows[slot, :size].copy()
        self.rows[slot, :size] = 0
        self.sizes[slot] = 0
        return blocks

    def blocks_to_write(self, slots: np.ndarray, positions: np.ndarray) -> int:
        """Number of free blocks needed to write one token per slot, at these positions."""
        index = positions // self.block_tokens
        missing = index >= self.sizes[slots]
        targets = self.rows[slots[~missing], index[~missing]]
        targets = targets[self.pool.references[targets] > 1]
        if not len(targets):
            return int(missing.sum())
        blocks, writers = np.unique(targets, return_counts=True)
        # If all owners of a block write to it, the last one keeps it.
        copies = np.minimum(writers, self.pool.references[blocks] - 1)
        return int(missing.sum() + copies.sum())

    def prepare_writes(
        self, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make each slot the only owner of the block at its position. Returns (sources, targets):
        blocks whose contents must be copied before anything is written."""
        self.extend(slots, num_tokens=positions + 1)
        index = positions // self.block_tokens
        shared = self.pool.references[self.rows[slots, index]] > 1
        sources, targets = [], []
        for slot, at in zip(slots[shared], index[shared], strict=True):
            source = self.rows[slot, at : at + 1].copy()
            if self.pool.references[source[0]] == 1:
                continue  # the other owners have moved to their copies
            target = self.pool.allocate(1)
            self.pool.release(source)
            self.rows[slot, at] = target[0]
            sources.append(source[0])
            targets.append(target[0])
        self.pool.content_ids[self.rows[slots, index]] += 1
        return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)
