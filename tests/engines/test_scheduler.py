"""The scheduler without a model: any mix of requests finishes, and every read finds its tokens."""

import numpy as np
from engine_rig import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engines.embedded.blocks import BlockPool, BlockTables
from millrace.engines.embedded.lanes import Lanes
from millrace.engines.embedded.scheduler import Plan, Scheduler
from millrace.engines.embedded.sequence import sequences_of


class Rehearsal:
    """Runs plans on a memory that stores each token's own number where its KV would go."""

    def __init__(
        self, *, num_lanes: int, num_blocks: int, block_tokens: int, prefill_tokens: int
    ) -> None:
        self.max_context = num_blocks * block_tokens
        self.pool = BlockPool(num_blocks)
        self.lanes = Lanes(num_lanes, max_context=self.max_context)
        self.tables = BlockTables(
            self.pool, num_lanes=num_lanes, max_context=self.max_context, block_tokens=block_tokens
        )
        self.scheduler = Scheduler(self.lanes, self.tables, prefill_tokens=prefill_tokens)
        self.memory = np.full((num_blocks, block_tokens), -1)
        self.prefill_tokens = prefill_tokens
        self.next_token = 0
        self.num_arrived = 0
        self.finished: list[int] = []  # arrivals

    def add(self, *, num_prompt: int, n: int, max_new_tokens: int) -> None:
        prompt = np.arange(num_prompt) + 1_000_000 * (self.num_arrived + 1)
        request = make_request(prompt=prompt, n=n, max_new_tokens=max_new_tokens)
        self.scheduler.add(sequences_of(request, first_arrival=self.num_arrived))
        self.num_arrived += n

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None, "there is work, but nothing to do"
        self.compute(plan)
        lanes, rows = self.scheduler.complete(plan)
        assert (self.lanes.num_cached[lanes] == self.lanes.num_tokens[lanes]).all()
        assert len(set(lanes)) == len(lanes) == len(rows)
        if not len(lanes):
            return
        tokens = self.next_token + np.arange(len(lanes))
        self.next_token += len(lanes)
        self.lanes.append(lanes, tokens=tokens, logprobs=np.zeros(len(lanes)), version=0)
        for lane in lanes[self.lanes.num_tokens[lanes] >= self.lanes.limits[lanes]]:
            sequence = self.lanes.sequence(lane)
            self.finished.append(sequence.arrival)
            self.scheduler.finish(sequence)

    def compute(self, plan: Plan) -> None:
        assert plan.counts[plan.num_single :].sum() <= self.prefill_tokens
        self.memory[plan.copy_targets] = self.memory[plan.copy_sources]
        block_tokens = self.tables.block_tokens
        for lane, count in zip(plan.lanes, plan.counts, strict=True):
            start = self.lanes.num_cached[lane]
            for at in range(start, start + count):
                block = self.tables.rows[lane, at // block_tokens]
                assert self.pool.references[block] == 1, "a shared block was written to"
                self.memory[block, at % block_tokens] = self.lanes.tokens[lane, at]
        for lane, count in zip(plan.lanes, plan.counts, strict=True):
            end = self.lanes.num_cached[lane] + count
            read = self.memory[self.tables.rows[lane]].reshape(-1)[:end]
            np.testing.assert_array_equal(read, self.lanes.tokens[lane, :end])


requests = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    late=requests,
    num_lanes=st.integers(1, 6),
    num_blocks=st.integers(5, 30),
    block_tokens=st.integers(1, 4),
    prefill_tokens=st.integers(1, 20),
    forget_at=st.integers(1, 60),
    park_at=st.integers(1, 60),
    hold_at=st.integers(1, 60),
)
def test_any_mix_of_requests_finishes_and_leaves_nothing_behind(
    requests,
    late,
    num_lanes,
    num_blocks,
    block_tokens,
    prefill_tokens,
    forget_at,
    park_at,
    hold_at,
):
    rehearsal = Rehearsal(
        num_lanes=num_lanes,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        prefill_tokens=prefill_tokens,
    )

    def add(many) -> None:
        for num_prompt, n, max_new_tokens in many:
            if num_prompt < rehearsal.max_context:
                rehearsal.add(num_prompt=num_prompt, n=n, max_new_tokens=max_new_tokens)

    add(requests)
    steps = 0
    scheduler = rehearsal.scheduler
    while scheduler.has_work or scheduler.num_held_back:
        if not scheduler.has_work:
            scheduler.seat_new()
        rehearsal.step()
        steps += 1
        if steps == 10:
            add(late)
        if steps == forget_at:
            scheduler.forget_kv()
        if steps == park_at:
            scheduler.park()
            assert not rehearsal.lanes.running()
        if steps == hold_at:
            scheduler.hold_new()
        assert steps < 10_000, "no progress"
    assert sorted(rehearsal.finished) == list(range(rehearsal.num_arrived))
    assert rehearsal.pool.num_free == num_blocks
    assert scheduler.num_waiting == 0


def test_while_new_ones_are_held_back_only_what_has_begun_goes_on():
    rehearsal = Rehearsal(num_lanes=2, num_blocks=40, block_tokens=2, prefill_tokens=64)
    for _ in range(3):
        rehearsal.add(num_prompt=3, n=1, max_new_tokens=4)
    rehearsal.step()
    rehearsal.scheduler.hold_new()
    rehearsal.add(num_prompt=3, n=2, max_new_tokens=4)
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert rehearsal.finished == [0, 1]
    assert rehearsal.scheduler.num_held_back == 3
    assert rehearsal.pool.num_free == 40
    rehearsal.scheduler.seat_new()
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert sorted(rehearsal.finished) == [0, 1, 2, 3, 4]


def test_the_latest_arrival_is_preempted_first():
    rehearsal = Rehearsal(num_lanes=4, num_blocks=12, block_tokens=2, prefill_tokens=64)
    for _ in range(3):
        rehearsal.add(num_prompt=2, n=1, max_new_tokens=14)
    while not rehearsal.scheduler.num_preemptions:
        rehearsal.step()
    assert sorted(s.arrival for s in rehearsal.lanes.running()) == [0, 1]
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert rehearsal.finished == [0, 1, 2]


def test_followers_share_every_full_block_of_the_prompt():
    rehearsal = Rehearsal(num_lanes=4, num_blocks=20, block_tokens=4, prefill_tokens=64)
    rehearsal.add(num_prompt=10, n=4, max_new_tokens=3)
    rehearsal.step()
    assert rehearsal.lanes.num_free == 0
    assert rehearsal.pool.num_free == 20 - 3
    rehearsal.step()  # each writes behind the prompt: three copies of its last, partial block
    assert rehearsal.pool.num_free == 20 - 3 - 3


def test_lanes_are_kept_free_for_the_followers_of_a_prefill_in_progress():
    rehearsal = Rehearsal(num_lanes=4, num_blocks=40, block_tokens=4, prefill_tokens=4)
    rehearsal.add(num_prompt=10, n=4, max_new_tokens=3)
    rehearsal.add(num_prompt=2, n=1, max_new_tokens=3)
    for _ in range(3):
        rehearsal.step()
    assert sorted(s.arrival for s in rehearsal.lanes.running()) == [0, 1, 2, 3]


def test_a_follower_whose_prefix_fills_all_blocks_gives_it_up_to_get_started():
    rehearsal = Rehearsal(num_lanes=1, num_blocks=3, block_tokens=2, prefill_tokens=64)
    rehearsal.add(num_prompt=5, n=2, max_new_tokens=1)
    rehearsal.step()  # the leader finishes; the prefix its follower holds leaves no block to write
    assert rehearsal.pool.num_free == 0
    rehearsal.step()
    assert rehearsal.finished == [0, 1]
