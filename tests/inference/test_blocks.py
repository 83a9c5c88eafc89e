"""Block tables against a model that stores every token's name in its block."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables

NUM_BLOCKS, NUM_LANES, BLOCK_TOKENS, MAX_CONTEXT = 12, 4, 3, 18


class TablesMachine(RuleBasedStateMachine):
    """Lanes grow, fork, write and die; what is read back through a table must be what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables = BlockTables(
            self.pool, num_lanes=NUM_LANES, max_context=MAX_CONTEXT, block_tokens=BLOCK_TOKENS
        )
        self.memory = np.full((NUM_BLOCKS, BLOCK_TOKENS), -1)
        self.lanes: dict[int, list[int]] = {}  # lane -> names of its tokens
        self.held: list[tuple[np.ndarray, list[int]]] = []  # blocks, names
        self.left: list[tuple[np.ndarray, np.ndarray, list[int]]] = []  # blocks, fillings, names
        self.next_name = 0

    def pick_free_lane(self) -> int:
        return next(lane for lane in range(NUM_LANES) if lane not in self.lanes)

    def name(self) -> int:
        self.next_name += 1
        return self.next_name

    @precondition(lambda self: len(self.lanes) < NUM_LANES)
    @rule(num_tokens=st.integers(1, 8))
    def prefill(self, num_tokens: int) -> None:
        if self.tables.blocks_for(num_tokens) > self.pool.num_free:
            return
        lane = self.pick_free_lane()
        self.tables.grow(lane, num_tokens=num_tokens)
        self.lanes[lane] = [self.name() for _ in range(num_tokens)]
        for at, name in enumerate(self.lanes[lane]):
            block = self.tables.rows[lane, at // BLOCK_TOKENS]
            self.memory[block, at % BLOCK_TOKENS] = name

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def write_one_token_in_some_lanes(self, data: st.DataObject) -> None:
        candidates = [lane for lane, names in self.lanes.items() if len(names) < MAX_CONTEXT]
        if not candidates:
            return
        chosen = data.draw(st.lists(st.sampled_from(candidates), min_size=1, unique=True))
        lanes = np.array(chosen)
        positions = np.array([len(self.lanes[lane]) for lane in chosen])
        needed = self.tables.blocks_to_write(lanes, positions)
        if needed > self.pool.num_free:
            return
        free = self.pool.num_free
        sources, targets = self.tables.prepare_writes(lanes, positions)
        assert free - self.pool.num_free == needed
        self.memory[targets] = self.memory[sources]
        for lane in chosen:
            at = len(self.lanes[lane])
            block = self.tables.rows[lane, at // BLOCK_TOKENS]
            assert self.pool.references[block] == 1
            self.lanes[lane].append(self.name())
            self.memory[block, at % BLOCK_TOKENS] = self.lanes[lane][-1]

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        self.held.append((self.tables.share(lane), list(self.lanes[lane])))

    @precondition(lambda self: self.held and len(self.lanes) < NUM_LANES)
    @rule()
    def seat_what_was_held(self) -> None:
        blocks, names = self.held.pop()
        lane = self.pick_free_lane()
        self.tables.seat(lane, blocks)
        self.lanes[lane] = names

    @precondition(lambda self: self.held)
    @rule()
    def drop_what_was_held(self) -> None:
        blocks, _ = self.held.pop(0)
        self.pool.release(blocks)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        self.tables.free(lane)
        del self.lanes[lane]

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), lasting=st.booleans())
    def leave_whole_blocks_on_the_shelves(self, data: st.DataObject, lasting: bool) -> None:
        lane = data.draw(st.sampled_from(sorted(self.lanes)))
        names = self.lanes.pop(lane)
        num_whole = len(names) // BLOCK_TOKENS
        blocks = self.tables.take(lane)
        self.pool.release(blocks[num_whole:])
        blocks = blocks[:num_whole]
        self.pool.shelve(blocks, lasting=lasting)
        self.left.append((blocks, self.pool.fillings[blocks], names[: num_whole * BLOCK_TOKENS]))

    @rule()
    def expire(self) -> None:
        self.pool.expire()

    @precondition(lambda self: self.left and len(self.lanes) < NUM_LANES)
    @rule(data=st.data())
    def find_again_what_is_left(self, data: st.DataObject) -> None:
        blocks, fillings, names = data.draw(st.sampled_from(self.left))
        num_left = int(np.cumprod(self.pool.fillings[blocks] == fillings).sum())
        if num_left == 0:
            return
        lane = self.pick_free_lane()
        self.pool.share(blocks[:num_left])
        self.tables.seat(lane, blocks[:num_left])
        self.lanes[lane] = names[: num_left * BLOCK_TOKENS]  # read back by the invariant

    @invariant()
    def every_lane_reads_what_it_wrote(self) -> None:
        for lane, names in self.lanes.items():
            read = self.memory[self.tables.rows[lane]].reshape(-1)[: len(names)]
            assert read.tolist() == names

    @invariant()
    def references_count_exactly_the_tables_and_holders(self) -> None:
        counts = Counter()
        for lane in range(NUM_LANES):
            counts.update(self.tables.rows[lane, : self.tables.sizes[lane]].tolist())
        for blocks, _ in self.held:
            counts.update(blocks.tolist())
        assert self.pool.references.tolist() == [counts[block] for block in range(NUM_BLOCKS)]
        assert self.pool.num_free == NUM_BLOCKS - len(counts)


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_block_is_handed_out_once_until_it_is_released():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted(first)


@pytest.mark.parametrize("verb", ["share", "release"])
def test_a_free_block_can_be_neither_shared_nor_released(verb: str):
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="a free block"):
        getattr(pool, verb)(blocks)


def test_shelved_blocks_are_free_and_go_in_the_order_in_which_they_are_least_missed():
    pool = BlockPool(9)
    passing, lasting, later = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.shelve(lasting, lasting=True)
    pool.shelve(passing, lasting=False)
    assert pool.num_free == 7
    pool.expire()  # what no request will find goes first, although it came later
    pool.shelve(later, lasting=False)
    assert pool.num_free == 9
    unused = set(range(9)) - {*passing, *lasting, *later}
    assert set(pool.allocate(3)) == unused
    # The end of a sequence is useless without its beginning, so it goes before it.
    order = [*passing[::-1], *lasting[::-1], *later[::-1]]
    assert [pool.allocate(1)[0] for _ in range(6)] == order


def test_a_shelved_block_that_is_shared_is_no_longer_free():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.shelve(blocks, lasting=False)
    fillings = pool.fillings[blocks].copy()
    pool.share(blocks)
    assert pool.num_free == 2
    assert not set(pool.allocate(2)) & set(blocks)
    assert (pool.fillings[blocks] == fillings).all()


def test_more_blocks_than_free_are_not_handed_out():
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        BlockPool(3).allocate(4)


def test_a_shared_partial_block_is_copied_by_the_first_writer_and_kept_by_the_last():
    tables = BlockTables(BlockPool(8), num_lanes=2, max_context=16, block_tokens=4)
    tables.grow(0, num_tokens=6)
    tables.seat(1, tables.share(0))
    full, partial = tables.rows[0, :2]
    sources, targets = tables.prepare_writes(np.array([0, 1]), np.array([6, 6]))
    assert sources.tolist() == [partial]
    assert tables.rows[0, :2].tolist() == [full, targets[0]]
    assert tables.rows[1, :2].tolist() == [full, partial]
    assert tables.pool.references[[full, partial, targets[0]]].tolist() == [2, 1, 1]
