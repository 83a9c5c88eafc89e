"""Plans the next forward pass: which sequences have a slot and blocks, and how much is prefilled.

Sequences get slots in order of arrival, or of priority. A pass computes one token for every slot
that is up to date, and up to `prefill_tokens` tokens for the others, unless FairShare leaves their
flow out. The members of a request share one prefill: the first member computes it, and the others
fork its block table. A recurrent state lies in a slot alone, so sequences of such models hold
nothing without a slot, and begin with a snapshot that the prefix cache finds.

When blocks run out, waiting sequences give up the prefixes they hold; then the latest arrival is
preempted and recomputes what was evicted. A single sequence always fits, because the engine refuses
others, so the earliest arrival always makes progress.
The engine's thread calls everything.
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np

from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.prefix_cache import Prefix, PrefixCache
from millrace.inference.embedded.kv.states import SnapshotWrite, StatePool, StateSnapshots
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.fair_share import FairShare
from millrace.inference.embedded.scheduling.sequence import (
    BatchPlan,
    DecodePlan,
    Sequence,
    extend_history,
)
from millrace.inference.embedded.scheduling.speculation import MAX_LIVE, DraftProposer
from millrace.inference.embedded.scheduling.wait_queue import WaitQueue

_MIN_PREFILL_TOKENS = 16  # smaller passes would save no memory worth having


@dataclass(eq=False)
class Scheduler:
    slots: BatchSlots
    tables: BlockTables
    _: KW_ONLY
    prefixes: PrefixCache
    prefill_tokens: int
    routes: RoutesPool | None = None
    states: StatePool | None = None
    snapshots: StateSnapshots | None = None  # of these states, if the prefix cache is on
    drafts: DraftProposer | None = None  # None = no speculation; needs a model without states

    def __post_init__(self) -> None:
        self.waiting = WaitQueue(self.tables.pool, prefixes=self.prefixes)
        self.shares = FairShare()
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # that were found instead of prefilled

    @property
    def has_work(self) -> bool:
        """True if there is something to compute; held sequences do not count."""
        return bool(self.waiting) or bool(self.slots.occupied.any())

    def add(self, sequences: list[Sequence]) -> None:
        leader, *followers = sequences
        leader.followers = followers
        self.waiting.add(leader)

    def plan(self, *, prefill_only: bool = False) -> BatchPlan | None:
        """The next pass, or its prefill if a decode loop does the rest; None without work."""
        self._free_blocks_for_writes()
        self._admit()
        slots = np.flatnonzero(self.slots.occupied)
        pending = self.slots.num_tokens[slots] - self.slots.num_cached[slots]
        self.shares.begin_pass(self.slots.flows[slots], np.minimum(pending, self.prefill_tokens))
        slots = self._without_left_out(slots)
        pending = self.slots.num_tokens[slots] - self.slots.num_cached[slots]
        single, chunked = slots[pending == 1], slots[pending > 1]
        if prefill_only:
            # A leader's last prompt token is prefill, too: its followers fork when it is computed.
            single, chunked = slots[:0], slots[(pending > 1) | self.slots.leads[slots]]
        if not len(single) + len(chunked):
            return None
        # Shortest first, so that sequences of similar length lie side by side and attend together.
        single = single[np.argsort(self.slots.num_cached[single], kind="stable")]
        if not len(chunked) and (drafts := self._drafts(single)):
            return self._plan_drafts(single, drafts)
        copies = self.tables.prepare_writes(single, self.slots.num_cached[single])
        chunked, chunks = self._chunks(chunked)
        slots = np.concatenate([single, chunked])
        counts = np.concatenate([np.ones(len(single), dtype=np.int64), chunks])
        snapshots: tuple[SnapshotWrite, ...] = ()
        if self.snapshots is not None:
            starts, num_tokens = self.slots.num_cached[slots], self.slots.num_tokens[slots]
            snapshots = self.snapshots.plan(slots, starts, counts, num_tokens=num_tokens)
        return BatchPlan(
            slots=slots, counts=counts, num_single=len(single), copies=copies, snapshots=snapshots
        )

    def _drafts(self, slots: np.ndarray) -> list[list[int]]:
        """Drafts of these slots, if some pay and there are blocks for them."""
        if self.drafts is None or len(slots) > MAX_LIVE:
            return []
        if not len(slots) or self.slots.leads[slots].any():
            return []
        drafts = self.drafts.propose(slots)
        if not drafts:
            return []
        starts = self.slots.num_cached[slots]
        ends = starts + 1 + [len(draft) for draft in drafts]
        return drafts if self.tables.has_room(slots, positions=starts, num_tokens=ends) else []

    def _plan_drafts(self, slots: np.ndarray, drafts: list[list[int]]) -> BatchPlan:
        """A pass that verifies the drafts of these slots. Rejected tokens leave KV behind, which
        the tokens in their place overwrite."""
        self.slots.put_drafts(slots, drafts)
        sizes = np.array([len(draft) for draft in drafts])
        order = np.argsort(sizes > 0, kind="stable")
        slots, sizes, num_single = slots[order], sizes[order], int((sizes == 0).sum())
        starts = self.slots.num_cached[slots]
        copies = self.tables.prepare_writes(slots, starts)
        self.tables.extend(slots, num_tokens=starts + 1 + sizes)
        return BatchPlan(
            slots=slots, counts=1 + sizes, num_single=num_single, copies=copies, drafts=sizes
        )

    def plan_decode(self, *, max_steps: int) -> DecodePlan | None:
        """A launch for the slots that are up to date, with as many steps as free blocks allow."""
        self._free_blocks_for_writes()
        slots = self._without_left_out(self._single_slots())
        slots = slots[~self.slots.leads[slots]]
        if not len(slots):
            return None
        # Those with penalties, biases or top logprobs first: the loop then treats no other rows so.
        slots = slots[np.argsort(self.slots.is_plain[slots], kind="stable")]
        num_cached, limits = self.slots.num_cached[slots], self.slots.limits[slots]
        num_steps = min(max_steps, int((limits - num_cached).max()) - 1)
        while num_steps > 1 and not self.tables.has_room(
            slots, positions=num_cached, num_tokens=np.minimum(num_cached + num_steps, limits - 1)
        ):
            num_steps //= 2
        copies = self.tables.prepare_writes(slots, num_cached)
        self.tables.extend(slots, num_tokens=np.minimum(num_cached + num_steps, limits - 1))
        return DecodePlan(slots=slots, num_steps=num_steps, copies=copies)

    def shrink_prefill(self) -> bool:
        """Plan smaller passes from now on; False if they are as small as they can be."""
        can_shrink = self.prefill_tokens > _MIN_PREFILL_TOKENS
        self.prefill_tokens //= 2 if can_shrink else 1
        return can_shrink

    def complete(self, plan: BatchPlan) -> tuple[np.ndarray, np.ndarray]:
        """Record that the pass was computed. Returns (slots, rows): the slots that now need a
        token, and for each the row of the plan with its logits. Followers of a finished prefill
        join on their leader's row."""
        slots = self.slots
        slots.num_cached[plan.slots] += plan.counts if plan.drafts is None else 1
        if self.snapshots is not None:
            self.snapshots.complete(plan.slots, plan.snapshots)
        due = np.flatnonzero(slots.num_cached[plan.slots] == slots.num_tokens[plan.slots])
        joined: list[int] = []
        rows: list[int] = []
        for row in due[slots.leads[plan.slots[due]]].tolist():
            forks = self._fork(slots.sequence(int(plan.slots[row])))
            joined += forks
            rows += [row] * len(forks)
        if not joined:
            return plan.slots[due], due
        return np.concatenate([plan.slots[due], joined]), np.concatenate([due, rows])

    def remove(self, request_id: str) -> list[Sequence]:
        """Remove and return all unfinished members of a request, running or waiting."""
        removed = [s for s in self.slots.running() if s.request.id == request_id]
        for sequence in removed:
            self.leave(sequence, ends=True)
        removed += self.waiting.remove(request_id)
        return removed + [follower for leader in removed for follower in leader.followers]

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, running or waiting."""
        leaders = [*self.slots.running(), *self.waiting.sequences()]
        return [member for leader in leaders for member in (leader, *leader.followers)]

    def preempt_all(self) -> None:
        """Move all running sequences to the wait queue. They keep the blocks of their KV, unless
        their prefill is still under way."""
        slots = self.slots
        for sequence in slots.running():
            slot = sequence.slot
            assert slot is not None
            is_decoding = slots.num_tokens[slot] - slots.num_cached[slot] == 1
            if is_decoding and not slots.leads[slot] and self.states is None:
                self._free_slot(sequence)
                sequence.held_blocks = self.tables.take(slot)
            else:
                self.leave(sequence, ends=False)
            self.waiting.add(sequence)

    def forget_kv(self, *, only_inputs: bool = False) -> None:
        """Drop all KV, so that other weights recompute it; or that of sequences that have sampled
        no token here: their record would not tell that several weights computed their context."""
        for sequence in self.slots.running():
            if not only_inputs or self.slots.num_tokens[sequence.slot] == sequence.num_input:
                self.tables.pool.release(self.tables.take(self._free_slot(sequence)))
                self.waiting.add(sequence)
        self.waiting.forget_kv(only_inputs=only_inputs)

    def begin(self, version: int, *, policy: str | None = None) -> None:
        """Other weights compute from now on, and use the KV that was not dropped."""
        self.prefixes.begin(version, policy=policy)
        for sequence in self.slots.running():
            self._record_source(sequence, at=int(self.slots.num_cached[sequence.slot]))

    def _chunks(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these slots prefill now, first in the queue first, and how many tokens each."""
        ranks = [self.slots.sequence(slot).rank for slot in slots]
        slots = slots[np.argsort(ranks, kind="stable")]
        pending = self.slots.num_tokens[slots] - self.slots.num_cached[slots]
        budgets = self.shares.prefill_limit(self.prefill_tokens) - (pending.cumsum() - pending)
        chunks = np.minimum(pending, budgets)
        return slots[chunks > 0], chunks[chunks > 0]

    def _without_left_out(self, slots: np.ndarray) -> np.ndarray:
        left_out = self.shares.left_out
        return slots[~np.isin(self.slots.flows[slots], left_out)] if len(left_out) else slots

    def _single_slots(self) -> np.ndarray:
        slots = self.slots
        return np.flatnonzero(slots.occupied & (slots.num_tokens - slots.num_cached == 1))

    def _blocks_to_write(self) -> int:
        single = self._single_slots()
        return self.tables.blocks_to_write(single, self.slots.num_cached[single])

    def _free_blocks_for_writes(self) -> None:
        """Preempt until every running slot can write its next token."""
        while self._blocks_to_write() > self.tables.pool.num_free:
            if self.waiting.drop_latest_held():
                continue
            latest = max(self.slots.running(), key=lambda sequence: sequence.arrival)
            self.leave(latest, ends=False)
            self.waiting.add(latest)
            self.num_preemptions += 1

    def _admit(self) -> None:
        """Give slots to waiting sequences, in order, as far as slots, blocks and prefill go."""
        if not self.waiting:
            return
        slots, tables = self.slots, self.tables
        running = slots.running()
        # Slots for the followers of a prefill in progress are reserved.
        num_free_slots = slots.num_free - sum(len(s.followers) for s in running)
        if num_free_slots <= 0:
            return
        pending = (slots.num_tokens - slots.num_cached)[slots.occupied]  # in order of `running`
        ranks = np.array([s.rank for s in running])
        num_started = 0  # tokens to prefill for sequences that get a slot now
        spare = tables.pool.num_free - self._blocks_to_write()
        while self.waiting and num_free_slots > 0:
            sequence = self.waiting.first
            is_forked = sequence.held_blocks is not None
            # Prefill of sequences that it passes does not delay it.
            is_before = (pending > 1) & (ranks <= sequence.rank)
            budget = self.prefill_tokens - num_started - int(pending[is_before].sum())
            if not is_forked and budget <= 0:
                break
            prefix = None if is_forked else self.prefixes.find(sequence)
            cost, num_new = self._cost(sequence, prefix)
            # One spare block per running slot, or the new sequence might be preempted at once.
            headroom = int(slots.occupied.sum())
            if cost + headroom > spare:
                if headroom == 0 and self.waiting.drop_latest_held():
                    spare = tables.pool.num_free
                    continue
                break
            self._start(self.waiting.take_first(), prefix)
            num_free_slots -= 1 + len(sequence.followers)
            spare -= cost
            num_started += num_new

    def _cost(self, sequence: Sequence, prefix: Prefix | None) -> tuple[int, int]:
        """Free blocks that the sequence needs to start, and tokens that it has to prefill."""
        if prefix is None:
            return 1, 0  # it writes into a shared block, which takes a copy
        # A cached block without references counts as free until it is taken.
        num_in_use = int((self.tables.pool.references[prefix.blocks] > 0).sum())
        num_tokens = len(sequence.tokens)
        return self.tables.blocks_for(num_tokens) - num_in_use, num_tokens - prefix.num_tokens

    def _start(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """Give a sequence a slot, with the KV of this prefix, or with the KV that it holds."""
        if prefix is None:
            assert sequence.held_blocks is not None
            blocks, num_cached = sequence.held_blocks, len(sequence.tokens) - 1
            sequence.held_blocks = None
        else:
            blocks, num_cached = prefix.blocks, prefix.num_tokens
            self.tables.pool.share(blocks)
            self.num_cached_tokens += num_cached
            sequence.kv_history = prefix.kv_history
        slot = self.slots.assign(sequence, num_cached=num_cached)
        self.tables.assign(slot, blocks)
        if prefix is not None and self.snapshots is not None and self.states is not None:
            self.snapshots.begin(slot, branch=prefix.num_known)
            if num_cached:
                self.states.copy(self.snapshots.use(int(blocks[-1])), [slot])
        self.tables.extend(np.array([slot]), num_tokens=np.array([len(sequence.tokens)]))
        self._record_source(sequence, at=num_cached)

    def _record_source(self, sequence: Sequence, *, at: int) -> None:
        source = self.prefixes.source_for(sequence.request)
        sequence.kv_history = extend_history(sequence.kv_history, at=at, source=source)

    def _fork(self, leader: Sequence) -> list[int]:
        """Let the followers share the leader's prefill; returns the slots of those that got one."""
        followers, leader.followers = leader.followers, []
        assert leader.slot is not None
        self.slots.leads[leader.slot] = False
        forked = []
        for follower in followers:
            follower.kv_history = leader.kv_history
            if not self.slots.num_free and self.states is not None:
                self.waiting.add(follower)
                continue
            blocks = self.tables.share(leader.slot)
            if not self.slots.num_free:
                follower.held_blocks = blocks
                self.waiting.add(follower)
                continue
            slot = self.slots.assign(follower, num_cached=len(follower.tokens))
            self.tables.assign(slot, blocks)
            if self.snapshots is not None:
                self.snapshots.begin(slot, branch=0)
            forked.append(slot)
        if self.states is not None and forked:
            self.states.copy(leader.slot, forked)
        if self.snapshots is not None and len(forked) < len(followers):
            # Those without a slot may get one before any of these sequences leaves.
            num_whole = len(leader.tokens) // self.tables.block_tokens
            self.prefixes.offer(leader, self.tables.rows[leader.slot, :num_whole].copy())
        return forked

    def leave(self, sequence: Sequence, *, ends: bool) -> None:
        slot = self._free_slot(sequence)
        blocks, num_cached = self.tables.take(slot), int(self.slots.num_cached[slot])
        self.prefixes.leave(sequence, blocks=blocks, num_cached=num_cached, ends=ends)
        if self.drafts is not None and ends:
            self.drafts.remember(sequence)

    def _free_slot(self, sequence: Sequence) -> int:
        """Free its slot, after a request to read the routes of the tokens that it fed there."""
        slot, slots, routes = sequence.slot, self.slots, sequence.routes
        assert slot is not None
        # Without a token that it sampled itself, it is prefilled again, and its routes with it.
        has_sampled = slots.num_tokens[slot] > sequence.num_input
        if self.routes is not None and routes is not None and has_sampled:
            positions = np.arange(routes.end, slots.num_cached[slot])
            if len(positions):
                routes.append(self.routes.read(self.tables.kv_slots(slot, positions)))
        return slots.free(sequence)
