"""Decides what the next forward pass computes: who has a lane, who has blocks, how much prefill.

Sequences get lanes in the order of their arrival. A pass takes one token of every lane that is up
to date, and up to `prefill_tokens` tokens of those that are not. The members of a request share
their prompt's prefill: the first computes it, the others fork its block table.

What earlier sequences computed of a newcomer's tokens is taken from the prefix cache.

When blocks run out, prefixes held by waiting sequences go first, then the latest arrival gives up
its lane and waits to be recomputed, as far as its KV is gone by then. A sequence alone always fits
(the engine refuses others), so the earliest arrival always makes progress.

While new ones are held back, a sequence that has no token yet and no lane gets none: what is in
flight comes to its end.

Called by the engine's thread.
"""

import numpy as np

from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.lineage import go_on
from millrace.inference.embedded.kv.prefix_cache import Prefix, PrefixCache
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import BatchPlan, RoundPlan, Sequence
from millrace.inference.embedded.scheduling.wait_queue import WaitQueue

_MIN_PREFILL_TOKENS = 16  # smaller passes would save no memory worth having


class Scheduler:
    def __init__(
        self,
        lanes: BatchSlots,
        tables: BlockTables,
        *,
        prefixes: PrefixCache,
        prefill_tokens: int,
        routes: RoutesPool | None = None,
    ) -> None:
        self._lanes = lanes
        self._routes = routes
        self._tables = tables
        self._prefixes = prefixes
        self._prefill_tokens = prefill_tokens
        self._waiting = WaitQueue(tables.pool, prefixes=prefixes)
        # Sequences in lanes when the weights last changed, and num_cached of all lanes then.
        self._unmarked: tuple[list[Sequence], np.ndarray] | None = None
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
        return bool(self._waiting) or bool(self._lanes.occupied.any())

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the members of one request."""
        leader, *followers = sequences
        leader.followers = followers
        self._waiting.add(leader)

    def plan(self) -> BatchPlan | None:
        """What to compute next; None if there is nothing to do."""
        self._free_blocks_for_writes()
        self._admit()
        lanes = np.flatnonzero(self._lanes.occupied)
        if not len(lanes):
            return None
        num_cached = self._lanes.num_cached[lanes]
        pending = self._lanes.num_tokens[lanes] - num_cached
        single = lanes[pending == 1]
        # Shortest first, so that sequences of similar length lie side by side and attend together.
        single = single[np.argsort(self._lanes.num_cached[single], kind="stable")]
        sources, targets = self._tables.prepare_writes(single, self._lanes.num_cached[single])
        chunked, chunks = self._chunks(lanes[pending > 1])
        return BatchPlan(
            lanes=np.concatenate([single, chunked]),
            counts=np.concatenate([np.ones(len(single), dtype=np.int64), chunks]),
            num_single=len(single),
            copy_sources=sources,
            copy_targets=targets,
        )

    def plan_prefill(self) -> BatchPlan | None:
        """The part of the next pass that is prefill, where rounds do the rest; None = no part."""
        self._free_blocks_for_writes()
        self._admit()
        pending = self._lanes.num_tokens - self._lanes.num_cached
        # A leader's last prompt token is prefill, too: its followers fork when it is computed.
        lanes = np.flatnonzero(self._lanes.occupied & ((pending > 1) | self._lanes.leads))
        if not len(lanes):
            return None
        chunked, chunks = self._chunks(lanes)
        nothing = np.empty(0, dtype=np.int64)
        return BatchPlan(
            lanes=chunked, counts=chunks, num_single=0, copy_sources=nothing, copy_targets=nothing
        )

    def plan_round(self, *, max_steps: int) -> RoundPlan | None:
        """A round of the lanes that are up to date, as long as the free blocks allow."""
        self._free_blocks_for_writes()
        lanes = self._single_lanes()
        lanes = lanes[~self._lanes.leads[lanes]]
        if not len(lanes):
            return None
        num_cached, limits = self._lanes.num_cached[lanes], self._lanes.limits[lanes]
        num_steps = min(max_steps, int((limits - num_cached).max()) - 1)
        while num_steps > 1 and not self._tables.has_room(
            lanes, positions=num_cached, num_tokens=np.minimum(num_cached + num_steps, limits - 1)
        ):
            num_steps //= 2
        sources, targets = self._tables.prepare_writes(lanes, num_cached)
        self._tables.extend(lanes, num_tokens=np.minimum(num_cached + num_steps, limits - 1))
        return RoundPlan(
            lanes=lanes, num_steps=num_steps, copy_sources=sources, copy_targets=targets
        )

    def shrink_prefill(self) -> bool:
        """Plan smaller passes from now on; False if they are as small as is sensible."""
        if self._prefill_tokens <= _MIN_PREFILL_TOKENS:
            return False
        self._prefill_tokens //= 2
        return True

    def complete(self, plan: BatchPlan) -> tuple[np.ndarray, np.ndarray]:
        """Take note that the pass was computed.

        Returns (lanes, rows): the lanes that now need a token, and for each the row of the plan
        whose last token decides it. Followers of a finished prefill join on their leader's row.
        """
        lanes = self._lanes
        lanes.num_cached[plan.lanes] += plan.counts
        due = np.flatnonzero(lanes.num_cached[plan.lanes] == lanes.num_tokens[plan.lanes])
        joined: list[int] = []
        rows: list[int] = []
        for row in due[lanes.leads[plan.lanes[due]]].tolist():
            forks = self._fork(lanes.sequence(int(plan.lanes[row])))
            joined += forks
            rows += [row] * len(forks)
        if not joined:
            return plan.lanes[due], due
        return np.concatenate([plan.lanes[due], joined]), np.concatenate([due, rows])

    def finish(self, sequence: Sequence) -> None:
        """Take a running sequence out."""
        self._leave(sequence, ends=True)

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all unfinished members of a request out, running or waiting."""
        removed = [s for s in self._lanes.running() if s.request.id == request_id]
        for sequence in removed:
            self.finish(sequence)
        removed += self._waiting.remove(request_id)
        return removed + [follower for leader in removed for follower in leader.followers]

    def sequences(self) -> list[Sequence]:
        """All that are here. Of those with a lane, the lane knows what was sampled."""
        leaders = [*self._lanes.running(), *self._waiting.sequences()]
        return [member for leader in leaders for member in (leader, *leader.followers)]

    def preempt_all(self) -> None:
        """Have all running sequences give up their lanes; what they have in the KV cache they take
        along, unless their prefill is still under way."""
        lanes = self._lanes
        self._mark_origins()
        for sequence in lanes.running():
            lane = sequence.lane
            assert lane is not None
            if lanes.num_tokens[lane] - lanes.num_cached[lane] == 1 and not lanes.leads[lane]:
                self._unseat(sequence)
                sequence.held_blocks = self._tables.take(lane)
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
        self._mark_origins()
        for sequence in self._lanes.running():
            self._tables.free(self._unseat(sequence))
            self._waiting.add(sequence)
        self._waiting.forget_kv()

    def begin(self, version: int) -> None:
        """Other weights compute from now on; what is cached and not forgotten is theirs to use.

        Decoding waits for this, so that what there is to note of each sequence is left to settle().
        """
        self._mark_origins()
        self._prefixes.begin(version)
        self._unmarked = self._lanes.running(), self._lanes.num_cached.copy()

    def settle(self) -> None:
        """Take note of what was left to be noted; to be called while the device works."""
        self._mark_origins()
        self._prefixes.settle()

    def _chunks(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these lanes prefill now, earliest arrival first, and how many tokens each."""
        if not len(lanes):
            return lanes, lanes
        order = sorted(lanes, key=lambda lane: self._lanes.sequence(lane).arrival)
        budget = self._prefill_tokens
        chosen, chunks = [], []
        for lane in order:
            chunk = min(int(self._lanes.num_tokens[lane] - self._lanes.num_cached[lane]), budget)
            if chunk == 0:
                break
            budget -= chunk
            chosen.append(lane)
            chunks.append(chunk)
        return np.array(chosen, dtype=np.int64), np.array(chunks, dtype=np.int64)

    def _single_lanes(self) -> np.ndarray:
        lanes = self._lanes
        return np.flatnonzero(lanes.occupied & (lanes.num_tokens - lanes.num_cached == 1))

    def _blocks_to_write(self) -> int:
        single = self._single_lanes()
        return self._tables.blocks_to_write(single, self._lanes.num_cached[single])

    def _free_blocks_for_writes(self) -> None:
        """Preempt until every running lane can write its next token."""
        while self._blocks_to_write() > self._tables.pool.num_free:
            if self._waiting.drop_latest_held():
                continue
            latest = max(self._lanes.running(), key=lambda sequence: sequence.arrival)
            self._leave(latest, ends=False)
            self._waiting.add(latest)
            self.num_preemptions += 1

    def _admit(self) -> None:
        """Give lanes to waiting sequences, in order, as far as lanes, blocks and prefill go."""
        if not self._waiting:
            return
        lanes, tables = self._lanes, self._tables
        running = lanes.running()
        # Lanes that followers of a prefill in progress will need are not given away.
        num_free_lanes = lanes.num_free - sum(len(s.followers) for s in running)
        pending = lanes.num_tokens[lanes.occupied] - lanes.num_cached[lanes.occupied]
        budget = self._prefill_tokens - int(pending[pending > 1].sum())
        spare = tables.pool.num_free - self._blocks_to_write()
        while self._waiting and num_free_lanes > 0:
            sequence = self._waiting.first
            is_forked = sequence.held_blocks is not None
            if not is_forked and budget <= 0:
                break
            prefix = None if is_forked else self._prefixes.find(sequence)
            cost, num_new = self._cost(sequence, prefix)
            # One block in hand for each running lane, lest the newcomer be preempted at once.
            headroom = int(lanes.occupied.sum())
            if cost + headroom > spare:
                if headroom == 0 and self._waiting.drop_latest_held():
                    spare = tables.pool.num_free
                    continue
                break
            self._seat(self._waiting.take_first(), prefix)
            num_free_lanes -= 1 + len(sequence.followers)
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

    def _seat(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """With the KV that was found of it or, where nothing was looked for, that it holds."""
        if prefix is None:
            assert sequence.held_blocks is not None
            blocks, num_cached = sequence.held_blocks, len(sequence.tokens) - 1
            sequence.held_blocks = None
        else:
            blocks, num_cached = prefix.blocks, prefix.num_tokens
            self._tables.pool.share(blocks)
            self.num_cached_tokens += num_cached
            sequence.lineage = prefix.lineage
        lane = self._lanes.seat(sequence, num_cached=num_cached)
        self._tables.seat(lane, blocks)
        self._tables.grow(lane, num_tokens=len(sequence.tokens))
        self._mark_origin(sequence, at=num_cached)

    def _mark_origins(self) -> None:
        """Note where the newest weights began to compute; before a lineage is read, or a lane given
        up."""
        if self._unmarked is None:
            return
        (sequences, num_cached), self._unmarked = self._unmarked, None
        for sequence in sequences:
            self._mark_origin(sequence, at=int(num_cached[sequence.lane]))

    def _mark_origin(self, sequence: Sequence, *, at: int) -> None:
        origin = self._prefixes.origin_of(sequence.request)
        sequence.lineage = go_on(sequence.lineage, at=at, origin=origin)

    def _fork(self, leader: Sequence) -> list[int]:
        """Let the followers share the leader's prefill; returns the lanes of those that got one."""
        self._mark_origins()
        followers, leader.followers = leader.followers, []
        assert leader.lane is not None
        self._lanes.leads[leader.lane] = False
        forked = []
        for follower in followers:
            follower.lineage = leader.lineage
            blocks = self._tables.share(leader.lane)
            if not self._lanes.num_free:
                follower.held_blocks = blocks
                self._waiting.add(follower)
                continue
            lane = self._lanes.seat(follower, num_cached=len(follower.tokens))
            self._tables.seat(lane, blocks)
            forked.append(lane)
        return forked

    def _leave(self, sequence: Sequence, *, ends: bool) -> None:
        self._mark_origins()
        lane = self._unseat(sequence)
        self._prefixes.leave(
            sequence,
            blocks=self._tables.take(lane),
            num_cached=int(self._lanes.num_cached[lane]),
            ends=ends,
        )

    def _unseat(self, sequence: Sequence) -> int:
        """Take its lane away, after a look at where the tokens went that it has fed in it."""
        lane, lanes, routes = sequence.lane, self._lanes, sequence.routes
        assert lane is not None
        has_begun = lanes.num_tokens[lane] > lanes.num_prompt[lane]  # else its prompt is read anew
        if self._routes is not None and routes is not None and has_begun:
            positions = np.arange(routes.end, lanes.num_cached[lane])
            if len(positions):
                routes.append(self._routes.read(self._tables.slots(lane, positions)))
        return lanes.unseat(sequence)
