"""Plans the next forward pass: which sequences have a slot and blocks, and how much is prefilled.

Sequences get slots in order of arrival, or of priority. A pass computes one token for every slot
that is up to date, and up to `prefill_tokens` tokens for the others. The members of a request share
one prefill: the first member computes it, and the others fork its block table. A prefix that the
prefix cache holds is not computed again.

When blocks run out, waiting sequences give up the prefixes they hold; then the latest arrival is
preempted and recomputes what was evicted. A single sequence always fits, because the engine refuses
others, so the earliest arrival always makes progress.

While new sequences are held, a sequence without a token and without a slot gets no slot, so the
running sequences come to an end. The engine's thread calls everything.
"""

import numpy as np

from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.prefix_cache import Prefix, PrefixCache
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import (
    BatchPlan,
    DecodePlan,
    Sequence,
    extend_history,
)
from millrace.inference.embedded.scheduling.wait_queue import WaitQueue

_MIN_PREFILL_TOKENS = 16  # smaller passes would save no memory worth having


class Scheduler:
    def __init__(
        self,
        slots: BatchSlots,
        tables: BlockTables,
        *,
        prefixes: PrefixCache,
        prefill_tokens: int,
        routes: RoutesPool | None = None,
    ) -> None:
        self._slots = slots
        self._routes = routes
        self._tables = tables
        self._prefixes = prefixes
        self._prefill_tokens = prefill_tokens
        self._waiting = WaitQueue(tables.pool, prefixes=prefixes)
        # Sequences in slots when the weights last changed, and num_cached of all slots then.
        self._unrecorded: tuple[list[Sequence], np.ndarray] | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # that were found instead of prefilled

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_waiting

    @property
    def num_held_back(self) -> int:
        return self._waiting.num_held_back

    @property
    def has_work(self) -> bool:
        """True if there is something to compute; what is held back is not."""
        return bool(self._waiting) or bool(self._slots.occupied.any())

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the members of one request."""
        leader, *followers = sequences
        leader.followers = followers
        self._waiting.add(leader)

    def plan(self) -> BatchPlan | None:
        """What to compute next; None if there is nothing to do."""
        self._free_blocks_for_writes()
        self._admit()
        slots = np.flatnonzero(self._slots.occupied)
        if not len(slots):
            return None
        num_cached = self._slots.num_cached[slots]
        pending = self._slots.num_tokens[slots] - num_cached
        single = slots[pending == 1]
        # Shortest first, so that sequences of similar length lie side by side and attend together.
        single = single[np.argsort(self._slots.num_cached[single], kind="stable")]
        sources, targets = self._tables.prepare_writes(single, self._slots.num_cached[single])
        chunked, chunks = self._chunks(slots[pending > 1])
        return BatchPlan(
            slots=np.concatenate([single, chunked]),
            counts=np.concatenate([np.ones(len(single), dtype=np.int64), chunks]),
            num_single=len(single),
            copy_sources=sources,
            copy_targets=targets,
        )

    def plan_prefill(self) -> BatchPlan | None:
        """The part of the next pass that is prefill, where rounds do the rest; None = no part."""
        self._free_blocks_for_writes()
        self._admit()
        pending = self._slots.num_tokens - self._slots.num_cached
        # A leader's last prompt token is prefill, too: its followers fork when it is computed.
        slots = np.flatnonzero(self._slots.occupied & ((pending > 1) | self._slots.leads))
        if not len(slots):
            return None
        chunked, chunks = self._chunks(slots)
        nothing = np.empty(0, dtype=np.int64)
        return BatchPlan(
            slots=chunked, counts=chunks, num_single=0, copy_sources=nothing, copy_targets=nothing
        )

    def plan_decode(self, *, max_steps: int) -> DecodePlan | None:
        """A round of the slots that are up to date, as long as the free blocks allow."""
        self._free_blocks_for_writes()
        slots = self._single_slots()
        slots = slots[~self._slots.leads[slots]]
        if not len(slots):
            return None
        num_cached, limits = self._slots.num_cached[slots], self._slots.limits[slots]
        num_steps = min(max_steps, int((limits - num_cached).max()) - 1)
        while num_steps > 1 and not self._tables.has_room(
            slots, positions=num_cached, num_tokens=np.minimum(num_cached + num_steps, limits - 1)
        ):
            num_steps //= 2
        sources, targets = self._tables.prepare_writes(slots, num_cached)
        self._tables.extend(slots, num_tokens=np.minimum(num_cached + num_steps, limits - 1))
        return DecodePlan(
            slots=slots, num_steps=num_steps, copy_sources=sources, copy_targets=targets
        )

    def shrink_prefill(self) -> bool:
        """Plan smaller passes from now on; False if they are as small as is sensible."""
        if self._prefill_tokens <= _MIN_PREFILL_TOKENS:
            return False
        self._prefill_tokens //= 2
        return True

    def complete(self, plan: BatchPlan) -> tuple[np.ndarray, np.ndarray]:
        """Take note that the pass was computed.

        Returns (slots, rows): the slots that now need a token, and for each the row of the plan
        whose last token decides it. Followers of a finished prefill join on their leader's row.
        """
        slots = self._slots
        slots.num_cached[plan.slots] += plan.counts
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

    def finish(self, sequence: Sequence) -> None:
        """Take a running sequence out."""
        self._leave(sequence, ends=True)

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all unfinished members of a request out, running or waiting."""
        removed = [s for s in self._slots.running() if s.request.id == request_id]
        for sequence in removed:
            self.finish(sequence)
        removed += self._waiting.remove(request_id)
        return removed + [follower for leader in removed for follower in leader.followers]

    def sequences(self) -> list[Sequence]:
        """All that are here. Of those with a slot, the slot knows what was sampled."""
        leaders = [*self._slots.running(), *self._waiting.sequences()]
        return [member for leader in leaders for member in (leader, *leader.followers)]

    def preempt_all(self) -> None:
        """Have all running sequences give up their slots; what they have in the KV cache they take
        along, unless their prefill is still under way."""
        slots = self._slots
        self._record_sources()
        for sequence in slots.running():
            slot = sequence.slot
            assert slot is not None
            if slots.num_tokens[slot] - slots.num_cached[slot] == 1 and not slots.leads[slot]:
                self._free_slot(sequence)
                sequence.held_blocks = self._tables.take(slot)
            else:
                self._leave(sequence, ends=False)
            self._waiting.add(sequence)

    def hold_new(self) -> None:
        """From now on, seat no sequence that has not begun."""
        self._waiting.hold_new()

    def release_new(self) -> None:
        """Undo hold_new()."""
        self._waiting.release_new()

    def forget_kv(self) -> None:
        """Have all KV recomputed: what is cached belongs to other weights."""
        self._record_sources()
        for sequence in self._slots.running():
            self._tables.free(self._free_slot(sequence))
            self._waiting.add(sequence)
        self._waiting.forget_kv()

    def begin(self, version: int) -> None:
        """Other weights compute from now on; what is cached and not forgotten is theirs to use.

        Decoding waits for this, so that what there is to note of each sequence is left to settle().
        """
        self._record_sources()
        self._prefixes.begin(version)
        self._unrecorded = self._slots.running(), self._slots.num_cached.copy()

    def settle(self) -> None:
        """Take note of what was left to be noted; to be called while the device works."""
        self._record_sources()
        self._prefixes.settle()

    def _chunks(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these slots prefill now, earliest arrival first, and how many tokens each."""
        if not len(slots):
            return slots, slots
        order = sorted(slots, key=lambda slot: self._slots.sequence(slot).arrival)
        budget = self._prefill_tokens
        chosen, chunks = [], []
        for slot in order:
            chunk = min(int(self._slots.num_tokens[slot] - self._slots.num_cached[slot]), budget)
            if chunk == 0:
                break
            budget -= chunk
            chosen.append(slot)
            chunks.append(chunk)
        return np.array(chosen, dtype=np.int64), np.array(chunks, dtype=np.int64)

    def _single_slots(self) -> np.ndarray:
        slots = self._slots
        return np.flatnonzero(slots.occupied & (slots.num_tokens - slots.num_cached == 1))

    def _blocks_to_write(self) -> int:
        single = self._single_slots()
        return self._tables.blocks_to_write(single, self._slots.num_cached[single])

    def _free_blocks_for_writes(self) -> None:
        """Preempt until every running slot can write its next token."""
        while self._blocks_to_write() > self._tables.pool.num_free:
            if self._waiting.drop_latest_held():
                continue
            latest = max(self._slots.running(), key=lambda sequence: sequence.arrival)
            self._leave(latest, ends=False)
            self._waiting.add(latest)
            self.num_preemptions += 1

    def _admit(self) -> None:
        """Give slots to waiting sequences, in order, as far as slots, blocks and prefill go."""
        if not self._waiting:
            return
        slots, tables = self._slots, self._tables
        running = slots.running()
        # Lanes that followers of a prefill in progress will need are not given away.
        num_free_slots = slots.num_free - sum(len(s.followers) for s in running)
        pending = slots.num_tokens[slots.occupied] - slots.num_cached[slots.occupied]
        budget = self._prefill_tokens - int(pending[pending > 1].sum())
        spare = tables.pool.num_free - self._blocks_to_write()
        while self._waiting and num_free_slots > 0:
            sequence = self._waiting.first
            is_forked = sequence.held_blocks is not None
            if not is_forked and budget <= 0:
                break
            prefix = None if is_forked else self._prefixes.find(sequence)
            cost, num_new = self._cost(sequence, prefix)
            # One block in hand for each running slot, lest the newcomer be preempted at once.
            headroom = int(slots.occupied.sum())
            if cost + headroom > spare:
                if headroom == 0 and self._waiting.drop_latest_held():
                    spare = tables.pool.num_free
                    continue
                break
            self._start(self._waiting.take_first(), prefix)
            num_free_slots -= 1 + len(sequence.followers)
            spare -= cost
            budget -= num_new

    def _cost(self, sequence: Sequence, prefix: Prefix | None) -> tuple[int, int]:
        """Free blocks that seating the sequence takes, and tokens it has to prefill."""
        if prefix is None:
            return 1, 0  # it writes into a block it shares, which takes a copy
        # A found block that nobody references is a free one until it is taken.
        num_in_use = int((self._tables.pool.references[prefix.blocks] > 0).sum())
        num_tokens = len(sequence.tokens)
        return self._tables.blocks_for(num_tokens) - num_in_use, num_tokens - prefix.num_tokens

    def _start(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """With the KV that was found of it or, where nothing was looked for, that it holds."""
        if prefix is None:
            assert sequence.held_blocks is not None
            blocks, num_cached = sequence.held_blocks, len(sequence.tokens) - 1
            sequence.held_blocks = None
        else:
            blocks, num_cached = prefix.blocks, prefix.num_tokens
            self._tables.pool.share(blocks)
            self.num_cached_tokens += num_cached
            sequence.kv_history = prefix.kv_history
        slot = self._slots.assign(sequence, num_cached=num_cached)
        self._tables.assign(slot, blocks)
        self._tables.grow(slot, num_tokens=len(sequence.tokens))
        self._record_source(sequence, at=num_cached)

    def _record_sources(self) -> None:
        """Record where the newest weights began to compute. Runs before a KV history is read and
        before a slot is freed."""
        if self._unrecorded is None:
            return
        (sequences, num_cached), self._unrecorded = self._unrecorded, None
        for sequence in sequences:
            self._record_source(sequence, at=int(num_cached[sequence.slot]))

    def _record_source(self, sequence: Sequence, *, at: int) -> None:
        source = self._prefixes.source_for(sequence.request)
        sequence.kv_history = extend_history(sequence.kv_history, at=at, source=source)

    def _fork(self, leader: Sequence) -> list[int]:
        """Let the followers share the leader's prefill; returns the slots of those that got one."""
        self._record_sources()
        followers, leader.followers = leader.followers, []
        assert leader.slot is not None
        self._slots.leads[leader.slot] = False
        forked = []
        for follower in followers:
            follower.kv_history = leader.kv_history
            blocks = self._tables.share(leader.slot)
            if not self._slots.num_free:
                follower.held_blocks = blocks
                self._waiting.add(follower)
                continue
            slot = self._slots.assign(follower, num_cached=len(follower.tokens))
            self._tables.assign(slot, blocks)
            forked.append(slot)
        return forked

    def _leave(self, sequence: Sequence, *, ends: bool) -> None:
        self._record_sources()
        slot = self._free_slot(sequence)
        self._prefixes.leave(
            sequence,
            blocks=self._tables.take(slot),
            num_cached=int(self._slots.num_cached[slot]),
            ends=ends,
        )

    def _free_slot(self, sequence: Sequence) -> int:
        """Take its slot away, after a look at where the tokens went that it has fed in it."""
        slot, slots, routes = sequence.slot, self._slots, sequence.routes
        assert slot is not None
        has_begun = slots.num_tokens[slot] > slots.num_prompt[slot]  # else its prompt is read anew
        if self._routes is not None and routes is not None and has_begun:
            positions = np.arange(routes.end, slots.num_cached[slot])
            if len(positions):
                routes.append(self._routes.read(self._tables.kv_slots(slot, positions)))
        return slots.free(sequence)
