"""The scheduler without a model: any mix of requests finishes, and every KV read is right."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_rig import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.scheduler import Scheduler
from millrace.inference.embedded.scheduling.sequence import BatchPlan, DecodeResult, sequences_of
from millrace.inference.embedded.scheduling.speculation import MAX_LIVE


@dataclass(frozen=True, eq=False)
class Entry:
    """What the memory holds in the place of a token's KV: all that the KV would depend on."""

    before: "Entry | None"
    token: int
    version: int

    @cached_property
    def versions(self) -> frozenset[int]:
        """All that had a part in it."""
        return frozenset({self.version}) | (self.before.versions if self.before else frozenset())


class Rehearsal:
    """Runs plans on a memory that stores what each token's KV depends on where it would go."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_tokens: int,
        prefill_tokens: int,
        keeps: bool = True,
    ) -> None:
        self.max_context = num_blocks * block_tokens
        self.pool = BlockPool(num_blocks)
        self.slots = BatchSlots(num_slots, max_context=self.max_context)
        self.tables = BlockTables(
            self.pool, num_slots=num_slots, max_context=self.max_context, block_tokens=block_tokens
        )
        self.prefixes = PrefixCache(self.pool, block_tokens=block_tokens, version=0, keeps=keeps)
        self.scheduler = Scheduler(
            self.slots, self.tables, prefixes=self.prefixes, prefill_tokens=prefill_tokens
        )
        self.memory = np.full((num_blocks, block_tokens), None, dtype=object)
        self.entries: dict[tuple[Entry | None, int, int], Entry] = {}
        self.prefill_tokens = prefill_tokens
        self.keeps = keeps
        self.version = 0
        self.num_prefilled = 0
        self.num_computed = 0  # passes
        self.now_s = 0.0
        self.num_heavy_tokens = 0  # computed for flows 1 to 9
        self.num_arrived = 0
        self.began: set[int] = set()  # arrivals that had a slot
        self.finished: list[int] = []  # arrivals

    def add(
        self,
        prompt: np.ndarray | int,  # its tokens, or how many that no other has
        *,
        n: int = 1,
        max_new_tokens: int = 1,
        session: str | None = None,
        flow: int = 0,
        priority: int = 0,
    ) -> None:
        if isinstance(prompt, int):
            prompt = np.arange(prompt) + 1_000_000 * (self.num_arrived + 1)
        request = make_request(prompt=prompt, n=n, max_new_tokens=max_new_tokens)
        request = dataclasses.replace(request, session=session, flow=flow, priority=priority)
        self.scheduler.add(sequences_of(request, first_arrival=self.num_arrived))
        self.num_arrived += n

    def swap(self) -> None:
        self.version += 1
        if not self.keeps:
            self.scheduler.forget_kv()
        self.scheduler.begin(self.version)

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None, "there is work, but nothing to do"
        self.compute(plan)
        # A pass takes 2 s, and 1 s for each token.
        flows = self.slots.flows[plan.slots]
        self.num_heavy_tokens += int(plan.counts[(flows > 0) & (flows < 10)].sum())
        pass_s = 2.0 + float(plan.counts.sum())
        self.now_s += pass_s
        self.scheduler.shares.end_pass(pass_s, num_steps=1)
        slots, rows = self.scheduler.complete(plan)
        assert (self.slots.num_cached[slots] == self.slots.num_tokens[slots]).all()
        assert len(set(slots)) == len(slots) == len(rows)
        if not len(slots):
            return
        tokens = self.slots.num_tokens[slots][None] % 2  # few values: prompts continue alike
        counts = np.ones(len(slots), dtype=np.int64)
        logprobs = np.zeros(tokens.shape)
        self.slots.append(slots, DecodeResult(tokens, logprobs, counts), version=0)
        for slot in slots[self.slots.num_tokens[slots] >= self.slots.limits[slots]]:
            sequence = self.slots.sequence(slot)
            self.finished.append(sequence.arrival)
            self.scheduler.leave(sequence, ends=True)

    def run(self) -> int:
        """To the end; returns how many tokens were prefilled."""
        before = self.num_prefilled
        while self.scheduler.has_work:
            self.step()
        return self.num_prefilled - before

    def read(self, slot: int, num_tokens: int) -> list[Entry]:
        return self.memory[self.tables.rows[slot]].reshape(-1)[:num_tokens].tolist()

    def entry(self, before: Entry | None, token: int) -> Entry:
        """Equal ones are the same."""
        key = (before, token, self.version)
        return self.entries.setdefault(key, Entry(*key))

    def check_newcomers(self) -> None:
        """What a plain request found was computed by the weights served now, and nothing else."""
        for sequence in self.slots.running():
            found = self.read(sequence.slot, int(self.slots.num_cached[sequence.slot]))
            is_plain = sequence.arrival not in self.began and sequence.request.session is None
            if found and (is_plain or not self.keeps) and not sequence.member:
                assert found[-1].versions == {self.version}
            self.began.add(sequence.arrival)

    def compute(self, plan: BatchPlan) -> None:
        assert plan.counts[plan.num_single :].sum() <= self.prefill_tokens
        self.num_prefilled += int(plan.counts[plan.num_single :].sum())
        sources, targets = plan.copies
        self.memory[targets] = self.memory[sources]
        self.check_newcomers()
        block_tokens = self.tables.block_tokens
        for slot, count in zip(plan.slots, plan.counts, strict=True):
            start = self.slots.num_cached[slot]
            for at in range(start, start + count):
                block = self.tables.rows[slot, at // block_tokens]
                assert self.pool.references[block] == 1, "a shared block was written to"
                before = self.read(slot, at)[-1] if at else None
                entry = self.entry(before, int(self.slots.tokens[slot, at]))
                self.memory[block, at % block_tokens] = entry
        # Not always, so that sequences also leave with origins that were not recorded yet.
        self.num_computed += 1
        if settles := self.num_computed % 2 == 0:
            self.prefixes.settle()
        for slot, count in zip(plan.slots, plan.counts, strict=True):
            end = self.slots.num_cached[slot] + count
            read = self.read(slot, end)
            np.testing.assert_array_equal([e.token for e in read], self.slots.tokens[slot, :end])
            assert all(entry.before is before for before, entry in pairwise([None, *read]))
            if settles:
                starts = [*(span.start for span in self.slots.sequence(slot).kv_history), end]
                recorded = [span.source.version for span in self.slots.sequence(slot).kv_history]
                assert [e.version for e in read] == np.repeat(recorded, np.diff(starts)).tolist()


# Prompts that begin alike, or not at all like another.
prompts = st.one_of(st.integers(1, 14), st.lists(st.integers(0, 1), min_size=1, max_size=14))
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 5),
        st.integers(1, 12),
        st.sampled_from([None, "a", "b"]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    late=requests,
    num_slots=st.integers(1, 6),
    num_blocks=st.integers(5, 30),
    block_tokens=st.integers(1, 4),
    prefill_tokens=st.integers(1, 20),
    keeps=st.booleans(),
    swap_at=st.sets(st.integers(1, 60), max_size=4),
    park_at=st.integers(1, 60),
    hold_at=st.integers(1, 60),
)
def test_any_mix_of_requests_finishes_and_frees_everything(
    requests,
    late,
    num_slots,
    num_blocks,
    block_tokens,
    prefill_tokens,
    keeps,
    swap_at,
    park_at,
    hold_at,
):
    rehearsal = Rehearsal(
        num_slots=num_slots,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        prefill_tokens=prefill_tokens,
        keeps=keeps,
    )

    def add(many) -> None:
        for prompt, n, max_new_tokens, session, flow in many:
            size = prompt if isinstance(prompt, int) else len(prompt)
            if size < rehearsal.max_context:
                prompt = prompt if isinstance(prompt, int) else np.array(prompt)
                rehearsal.add(
                    prompt, n=n, max_new_tokens=max_new_tokens, session=session, flow=flow
                )

    add(requests)
    steps = 0
    scheduler = rehearsal.scheduler
    while scheduler.has_work or scheduler.waiting.num_held:
        if not scheduler.has_work:
            scheduler.waiting.release_new()
        rehearsal.step()
        steps += 1
        if steps == 10:
            add(late)
        if steps in swap_at:
            rehearsal.swap()
        if steps == park_at:
            scheduler.preempt_all()
            assert not rehearsal.slots.running()
        if steps == hold_at:
            scheduler.waiting.hold_new()
        assert steps < 10_000, "no progress"
    assert sorted(rehearsal.finished) == list(range(rehearsal.num_arrived))
    assert rehearsal.pool.num_free == num_blocks
    assert scheduler.waiting.num_waiting == 0


def test_hold_new_lets_only_begun_sequences_continue():
    rehearsal = Rehearsal(num_slots=2, num_blocks=40, block_tokens=2, prefill_tokens=64)
    for _ in range(3):
        rehearsal.add(3, n=1, max_new_tokens=4)
    rehearsal.step()
    rehearsal.scheduler.waiting.hold_new()
    rehearsal.add(3, n=2, max_new_tokens=4)
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert rehearsal.finished == [0, 1]
    assert rehearsal.scheduler.waiting.num_held == 3
    assert rehearsal.pool.num_free == 40
    rehearsal.scheduler.waiting.release_new()
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert sorted(rehearsal.finished) == [0, 1, 2, 3, 4]


def test_latest_arrival_is_preempted_first():
    rehearsal = Rehearsal(num_slots=4, num_blocks=12, block_tokens=2, prefill_tokens=64)
    for _ in range(3):
        rehearsal.add(2, n=1, max_new_tokens=14)
    while not rehearsal.scheduler.num_preemptions:
        rehearsal.step()
    assert sorted(s.arrival for s in rehearsal.slots.running()) == [0, 1]
    while rehearsal.scheduler.has_work:
        rehearsal.step()
    assert rehearsal.finished == [0, 1, 2]


def test_followers_share_every_full_block_of_the_prompt():
    rehearsal = Rehearsal(num_slots=4, num_blocks=20, block_tokens=4, prefill_tokens=64)
    rehearsal.add(10, n=4, max_new_tokens=3)
    rehearsal.step()
    assert rehearsal.slots.num_free == 0
    assert rehearsal.pool.num_free == 20 - 3
    rehearsal.step()  # each writes behind the prompt: three copies of its last, partial block
    assert rehearsal.pool.num_free == 20 - 3 - 3


def test_slots_are_reserved_for_followers_of_a_prefill():
    rehearsal = Rehearsal(num_slots=4, num_blocks=40, block_tokens=4, prefill_tokens=4)
    rehearsal.add(10, n=4, max_new_tokens=3)
    rehearsal.add(2, n=1, max_new_tokens=3)
    for _ in range(3):
        rehearsal.step()
    assert sorted(s.arrival for s in rehearsal.slots.running()) == [0, 1, 2, 3]


def test_follower_drops_held_prefix_that_fills_all_blocks():
    rehearsal = Rehearsal(num_slots=1, num_blocks=3, block_tokens=2, prefill_tokens=64)
    rehearsal.add(5, n=2, max_new_tokens=1)
    rehearsal.step()  # the leader finishes; the prefix its follower holds leaves no block to write
    assert rehearsal.pool.num_free == 0
    rehearsal.step()
    assert rehearsal.finished == [0, 1]


def test_rewritten_block_is_not_found_in_prefix_cache():
    rehearsal = Rehearsal(num_slots=2, num_blocks=20, block_tokens=2, prefill_tokens=64)
    rehearsal.add(3, max_new_tokens=3)
    rehearsal.add(np.array([0, 1, 0, 1]), n=2, max_new_tokens=2, session="s")
    rehearsal.step()
    rehearsal.step()
    assert rehearsal.finished == [1]  # it left the prompt's blocks, which its follower holds
    rehearsal.swap()
    rehearsal.step()  # the follower computes the prompt's last token once more, in its place
    assert rehearsal.finished == [1, 0]
    rehearsal.add(np.array([0, 1, 0, 1, 1]), session="s")
    rehearsal.run()  # checks what it reads
    assert rehearsal.scheduler.num_cached_tokens == 2


def test_session_computes_every_token_once_across_versions():
    rehearsal = Rehearsal(num_slots=2, num_blocks=60, block_tokens=4, prefill_tokens=64)
    costs = []
    for turn in range(10):
        rehearsal.add(np.arange(8 * (turn + 1)), session="s")
        costs.append(rehearsal.run())
        rehearsal.swap()
    assert costs == [8] * 10


def test_sampling_settings_of_chosen_slots_are_contiguous():
    slots = BatchSlots(4, max_context=16)
    rows = slots.sampling_batch(np.array([2, 0]), vocab_size=8, device=torch.device("cpu"))
    vectors = (rows.temperatures, rows.top_k, rows.top_p, rows.min_p, rows.keys, rows.positions)
    assert all(vector.is_contiguous() for vector in vectors)


LONG = [{"prompt": 200, "max_new_tokens": 1}] * 40
MANY = [{"prompt": 3, "n": 12, "max_new_tokens": 200}] * 4
BOTH = [{"prompt": 60, "n": 4, "max_new_tokens": 90}] * 12


@pytest.mark.parametrize(
    ("heavy", "num_flows"), [(LONG, 1), (LONG, 4), (MANY, 1), (MANY, 4), (BOTH, 1)]
)
def test_small_flow_takes_at_most_three_times_as_long_beside_heavy_ones(heavy, num_flows: int):
    def seconds_of_small(rehearsal: Rehearsal) -> float:
        arrival, start_s = rehearsal.num_arrived, rehearsal.now_s
        rehearsal.add(3, max_new_tokens=20, flow=10 + arrival, priority=64)
        while arrival not in rehearsal.finished:
            rehearsal.step()
        return rehearsal.now_s - start_s

    sizes = {"num_slots": 64, "num_blocks": 1000, "block_tokens": 8, "prefill_tokens": 64}
    alone_s = seconds_of_small(Rehearsal(**sizes))
    rehearsal = Rehearsal(**sizes)
    for number, each in enumerate(heavy):
        rehearsal.add(**each, flow=1 + number % num_flows)
    for _ in range(8):
        rehearsal.step()
        assert seconds_of_small(rehearsal) < 3 * alone_s
    # The heavy flows had about half of the time.
    assert rehearsal.num_heavy_tokens > 0.4 * rehearsal.now_s


class EachTokenDrafted:
    def propose(self, slots: np.ndarray) -> list[list[int]]:
        return [[7]] * len(slots)


def test_a_small_flow_has_drafts_in_passes_without_a_heavy_one():
    rehearsal = Rehearsal(num_slots=64, num_blocks=1000, block_tokens=8, prefill_tokens=64)
    for _ in range(MAX_LIVE):
        rehearsal.add(3, max_new_tokens=90, flow=1)
    rehearsal.add(3, max_new_tokens=90, flow=2)
    scheduler, found = rehearsal.scheduler, set()
    for _ in range(40):
        scheduler.drafts = EachTokenDrafted()  # type: ignore[assignment]
        plan = scheduler.plan()
        assert plan is not None
        scheduler.drafts = None
        found.add((*np.unique(rehearsal.slots.flows[plan.slots]).tolist(), plan.drafts is not None))
        rehearsal.step()
    assert (2, True) in found
    assert (1, 2, False) in found
    assert (1, 2, True) not in found


def test_flows_of_the_same_size_compute_in_each_pass():
    rehearsal = Rehearsal(num_slots=8, num_blocks=100, block_tokens=8, prefill_tokens=64)
    for flow in range(8):
        rehearsal.add(3, max_new_tokens=20, flow=flow)
    rehearsal.run()
    assert rehearsal.num_computed == 20
