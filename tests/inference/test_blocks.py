"""Block tables against a model that stores every token's name in its block."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables

NUM_BLOCKS, NUM_SLOTS, BLOCK_TOKENS, MAX_CONTEXT = 12, 4, 3, 18


class TablesMachine(RuleBasedStateMachine):
    """Slots grow, fork, write and are freed; a table reads back exactly what its slot wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables = BlockTables(
            self.pool, num_slots=NUM_SLOTS, max_context=MAX_CONTEXT, block_tokens=BLOCK_TOKENS
        )
        self.memory = np.full((NUM_BLOCKS, BLOCK_TOKENS), -1)
        self.slots: dict[int, list[int]] = {}  # slot -> names of its tokens
        self.held: list[tuple[np.ndarray, list[int]]] = []  # blocks, names
        self.left: list[tuple[np.ndarray, np.ndarray, list[int]]] = []  # blocks, fillings, names
        self.next_name = 0

    def pick_free_slot(self) -> int:
        return next(slot for slot in range(NUM_SLOTS) if slot not in self.slots)

    def name(self) -> int:
        self.next_name += 1
        return self.next_name

    @precondition(lambda self: len(self.slots) < NUM_SLOTS)
    @rule(num_tokens=st.integers(1, 8))
    def prefill(self, num_tokens: int) -> None:
        if self.tables.blocks_for(num_tokens) > self.pool.num_free:
            return
        slot = self.pick_free_slot()
        self.tables.extend(np.array([slot]), num_tokens=np.array([num_tokens]))
        self.slots[slot] = [self.name() for _ in range(num_tokens)]
        for at, name in enumerate(self.slots[slot]):
            block = self.tables.rows[slot, at // BLOCK_TOKENS]
            self.memory[block, at % BLOCK_TOKENS] = name

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def write_one_token_in_some_slots(self, data: st.DataObject) -> None:
        candidates = [slot for slot, names in self.slots.items() if len(names) < MAX_CONTEXT]
        if not candidates:
            return
        chosen = data.draw(st.lists(st.sampled_from(candidates), min_size=1, unique=True))
        slots = np.array(chosen)
        positions = np.array([len(self.slots[slot]) for slot in chosen])
        needed = self.tables.blocks_to_write(slots, positions)
        if needed > self.pool.num_free:
            return
        free = self.pool.num_free
        sources, targets = self.tables.prepare_writes(slots, positions)
        assert free - self.pool.num_free == needed
        self.memory[targets] = self.memory[sources]
        for slot in chosen:
            at = len(self.slots[slot])
            block = self.tables.rows[slot, at // BLOCK_TOKENS]
            assert self.pool.references[block] == 1
            self.slots[slot].append(self.name())
            self.memory[block, at % BLOCK_TOKENS] = self.slots[slot][-1]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        self.held.append((self.tables.share(slot), list(self.slots[slot])))

    @precondition(lambda self: self.held and len(self.slots) < NUM_SLOTS)
    @rule()
    def seat_what_was_held(self) -> None:
        blocks, names = self.held.pop()
        slot = self.pick_free_slot()
        self.tables.assign(slot, blocks)
        self.slots[slot] = names

    @precondition(lambda self: self.held)
    @rule()
    def drop_what_was_held(self) -> None:
        blocks, _ = self.held.pop(0)
        self.pool.release(blocks)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        self.pool.release(self.tables.take(slot))
        del self.slots[slot]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), survives_swaps=st.booleans())
    def release_whole_blocks_for_reuse(self, data: st.DataObject, survives_swaps: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        names = self.slots.pop(slot)
        num_whole = len(names) // BLOCK_TOKENS
        blocks = self.tables.take(slot)
        self.pool.release(blocks[num_whole:])
        blocks = blocks[:num_whole]
        self.pool.release_reusable(blocks, survives_swaps=survives_swaps)
        self.left.append((blocks, self.pool.content_ids[blocks], names[: num_whole * BLOCK_TOKENS]))

    @rule()
    def expire(self) -> None:
        self.pool.expire()

    @precondition(lambda self: self.left and len(self.slots) < NUM_SLOTS)
    @rule(data=st.data())
    def find_again_what_is_left(self, data: st.DataObject) -> None:
        blocks, fillings, names = data.draw(st.sampled_from(self.left))
        num_left = int(np.cumprod(self.pool.content_ids[blocks] == fillings).sum())
        if num_left == 0:
            return
        slot = self.pick_free_slot()
        self.pool.share(blocks[:num_left])
        self.tables.assign(slot, blocks[:num_left])
        self.slots[slot] = names[: num_left * BLOCK_TOKENS]  # read back by the invariant

    @invariant()
    def every_slot_reads_what_it_wrote(self) -> None:
        for slot, names in self.slots.items():
            read = self.memory[self.tables.rows[slot]].reshape(-1)[: len(names)]
            assert read.tolist() == names

    @invariant()
    def references_count_exactly_the_tables_and_holders(self) -> None:
        counts = Counter()
        for slot in range(NUM_SLOTS):
            counts.update(self.tables.rows[slot, : self.tables.sizes[slot]].tolist())
        for blocks, _ in self.held:
            counts.update(blocks.tolist())
        assert self.pool.references.tolist() == [counts[block] for block in range(NUM_BLOCKS)]
        assert self.pool.num_free == NUM_BLOCKS - len(counts)


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_block_is_allocated_once_until_it_is_released():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted(first)


@pytest.mark.parametrize("verb", ["share", "release"])
def test_free_block_cannot_be_shared_or_released(verb: str):
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="a free block"):
        getattr(pool, verb)(blocks)


def test_reusable_blocks_are_free_and_evicted_in_lru_order():
    pool = BlockPool(9)
    passing, lasting, later = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.release_reusable(lasting, survives_swaps=True)
    pool.release_reusable(passing, survives_swaps=False)
    assert pool.num_free == 7
    pool.expire()  # what no request will find goes first, although it came later
    pool.release_reusable(later, survives_swaps=False)
    assert pool.num_free == 9
    unused = set(range(9)) - {*passing, *lasting, *later}
    assert set(pool.allocate(3)) == unused
    # The end of a sequence is useless without its beginning, so it goes before it.
    order = [*passing[::-1], *lasting[::-1], *later[::-1]]
    assert [pool.allocate(1)[0] for _ in range(6)] == order


def test_shared_reusable_block_is_not_free():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release_reusable(blocks, survives_swaps=False)
    fillings = pool.content_ids[blocks].copy()
    pool.share(blocks)
    assert pool.num_free == 2
    assert not set(pool.allocate(2)) & set(blocks)
    assert (pool.content_ids[blocks] == fillings).all()


def test_allocating_more_blocks_than_free_fails():
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        BlockPool(3).allocate(4)


def test_first_writer_copies_a_shared_block_and_last_writer_keeps_it():
    tables = BlockTables(BlockPool(8), num_slots=2, max_context=16, block_tokens=4)
    tables.extend(np.array([0]), num_tokens=np.array([6]))
    tables.assign(1, tables.share(0))
    full, partial = tables.rows[0, :2]
    sources, targets = tables.prepare_writes(np.array([0, 1]), np.array([6, 6]))
    assert sources.tolist() == [partial]
    assert tables.rows[0, :2].tolist() == [full, targets[0]]
    assert tables.rows[1, :2].tolist() == [full, partial]
    assert tables.pool.references[[full, partial, targets[0]]].tolist() == [2, 1, 1]
