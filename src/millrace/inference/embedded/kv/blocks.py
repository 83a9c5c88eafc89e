"""Which KV block belongs to whom: a pool of reference-counted blocks, and one block table per lane.

Promise: a block is either free or referenced; the count says exactly how many tables and held
prefixes name it; a block that more than one of them names is never written to. A free block is
unused, or shelved: then it keeps its contents, which may be shared again, until it is allocated.

Host side only (numpy); the tensors behind the block numbers live in kv_cache.py.
Called by the engine's thread.
"""

import numpy as np

from millrace.inference.embedded.kv.free_blocks import FreeBlockLRU


class BlockPool:
    """Reference counts of `num_blocks` blocks, and those that are free."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)  # a stack; top = last
        self._num_unused = num_blocks
        self._shelves = FreeBlockLRU()
        self._is_lasting = np.zeros(num_blocks, dtype=bool)  # someone shelved these contents so
        self.references = np.zeros(num_blocks, dtype=np.int32)
        # A number per block that changes when its contents do: who noted it can tell.
        self.fillings = np.zeros(num_blocks, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return self._num_unused + len(self._shelves)

    def allocate(self, count: int) -> np.ndarray:
        """[count] block numbers, each with one reference; what they held is gone."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        if count > self._num_unused:
            given_up = self._shelves.give_up(count - self._num_unused)
            self._discard(np.array(given_up, dtype=np.int64))
        blocks = self._unused[self._num_unused - count : self._num_unused].copy()
        self._num_unused -= count
        self.references[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """One more reference to each of these distinct blocks, referenced or shelved."""
        self._shelves.take(blocks[self.references[blocks] == 0].tolist())
        self.references[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """One reference less to each of these distinct blocks; without any, a block is unused, or
        shelved again if another wants it to last."""
        idle = self._unreference(blocks)
        is_lasting = self._is_lasting[idle]
        self._shelves.put(idle[is_lasting][::-1].tolist(), lasting=True)
        self._discard(idle[~is_lasting])

    def shelve(self, blocks: np.ndarray, *, lasting: bool) -> None:
        """Like release(), but without any reference a block is shelved; lasting: beyond expire().

        `blocks` are in the order of their tokens: the last are useless without the first, so they
        are given up before them.
        """
        if lasting:
            self._is_lasting[blocks] = True
        idle = self._unreference(blocks)[::-1]
        is_lasting = self._is_lasting[idle]
        self._shelves.put(idle[~is_lasting].tolist(), lasting=False)
        self._shelves.put(idle[is_lasting].tolist(), lasting=True)

    def expire(self) -> None:
        """What is shelved now, and not lasting, is given up before everything else."""
        self._shelves.expire()

    def write(self, blocks: np.ndarray) -> None:
        """Take note that the contents of these blocks change."""
        self.fillings[blocks] += 1

    def _unreference(self, blocks: np.ndarray) -> np.ndarray:
        """Returns those that have no reference left."""
        assert (self.references[blocks] > 0).all(), "a free block cannot be released"
        self.references[blocks] -= 1
        return blocks[self.references[blocks] == 0]

    def _discard(self, blocks: np.ndarray) -> None:
        self.fillings[blocks] += 1
        self._is_lasting[blocks] = False
        self._unused[self._num_unused : self._num_unused + len(blocks)] = blocks
        self._num_unused += len(blocks)


class BlockTables:
    """The blocks of each lane, in the order of its tokens."""

    def __init__(
        self, pool: BlockPool, *, num_lanes: int, max_context: int, block_tokens: int
    ) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        # Unused entries are 0: a valid block, so that padded gathers need no special case.
        self.rows = np.zeros((num_lanes, -(-max_context // block_tokens)), dtype=np.int64)
        self.sizes = np.zeros(num_lanes, dtype=np.int64)  # blocks in use, per lane

    def slots(self, lanes: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where the cache holds these tokens, [T] each."""
        blocks = self.rows[lanes, positions // self.block_tokens]
        return blocks * self.block_tokens + positions % self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def seat(self, lane: int, blocks: np.ndarray) -> None:
        """Give an empty lane these blocks, and the reference to each that came with them."""
        assert self.sizes[lane] == 0, f"lane {lane} already has blocks"
        self.rows[lane, : len(blocks)] = blocks
        self.sizes[lane] = len(blocks)

    def grow(self, lane: int, *, num_tokens: int) -> None:
        """Allocate what the lane lacks to hold `num_tokens`."""
        size, wanted = int(self.sizes[lane]), self.blocks_for(num_tokens)
        if wanted > size:
            self.rows[lane, size:wanted] = self.pool.allocate(wanted - size)
            self.sizes[lane] = wanted

    def has_room(self, lanes: np.ndarray, *, positions: np.ndarray, num_tokens: np.ndarray) -> bool:
        """True if these lanes could write from their positions on, up to num_tokens each."""
        sizes = np.maximum(self.sizes[lanes], positions // self.block_tokens + 1)
        further = np.maximum(-(-num_tokens // self.block_tokens) - sizes, 0)
        return self.blocks_to_write(lanes, positions) + further.sum() <= self.pool.num_free

    def extend(self, lanes: np.ndarray, *, num_tokens: np.ndarray) -> None:
        """Allocate what each of these lanes lacks to hold its num_tokens."""
        sizes, wanted = self.sizes[lanes], -(-num_tokens // self.block_tokens)
        lacking = np.maximum(wanted - sizes, 0)
        rows = np.repeat(lanes, lacking)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(lacking) - lacking, lacking)
        self.rows[rows, np.repeat(sizes, lacking) + within] = self.pool.allocate(len(rows))
        self.sizes[lanes] = sizes + lacking

    def share(self, lane: int) -> np.ndarray:
        """All blocks of the lane, with a new reference to each for the caller to hold."""
        blocks = self.rows[lane, : self.sizes[lane]].copy()
        self.pool.share(blocks)
        return blocks

    def take(self, lane: int) -> np.ndarray:
        """Empty the lane; its blocks are the caller's, with the reference to each."""
        size = self.sizes[lane]
        blocks = self.rows[lane, :size].copy()
        self.rows[lane, :size] = 0
        self.sizes[lane] = 0
        return blocks

    def free(self, lane: int) -> None:
        self.pool.release(self.take(lane))

    def blocks_to_write(self, lanes: np.ndarray, positions: np.ndarray) -> int:
        """Free blocks that writing one token per lane, at these positions, takes."""
        index = positions // self.block_tokens
        missing = index >= self.sizes[lanes]
        targets = self.rows[lanes[~missing], index[~missing]]
        targets = targets[self.pool.references[targets] > 1]
        if not len(targets):
            return int(missing.sum())
        blocks, writers = np.unique(targets, return_counts=True)
        # If all who share a block write to it, the last one may keep it.
        copies = np.minimum(writers, self.pool.references[blocks] - 1)
        return int(missing.sum() + copies.sum())

    def prepare_writes(
        self, lanes: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make each lane the only owner of the block at its position.

        Returns (sources, targets): blocks whose contents must be copied before anything is written.
        """
        index = positions // self.block_tokens
        missing = index >= self.sizes[lanes]
        if missing.any():
            grown = lanes[missing]
            assert (index[missing] == self.sizes[grown]).all(), "a lane grows block by block"
            self.rows[grown, index[missing]] = self.pool.allocate(len(grown))
            self.sizes[grown] += 1
        shared = self.pool.references[self.rows[lanes, index]] > 1
        sources, targets = [], []
        for lane, at in zip(lanes[shared], index[shared], strict=True):
            source = self.rows[lane, at : at + 1].copy()
            if self.pool.references[source[0]] == 1:
                continue  # the others who shared it have moved to their copies
            target = self.pool.allocate(1)
            self.pool.release(source)
            self.rows[lane, at] = target[0]
            sources.append(source[0])
            targets.append(target[0])
        self.pool.write(self.rows[lanes, index])
        return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)
