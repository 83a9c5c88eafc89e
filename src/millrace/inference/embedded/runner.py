"""Runs the model on a plan: flat batch in, logits of the rows that need a token out.

R = rows (slots) of the plan, T = tokens of the pass, V = vocabulary.
Called by the engine's thread.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.prefill import PrefillLayer
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.cache import KVCache
from millrace.inference.embedded.kv.paged_attention import Bucket, PagedBatch
from millrace.inference.embedded.lora.bank import AdapterBank
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import BatchPlan
from millrace.models.loading import hidden_states

# What one more bucket costs per layer, in KV blocks that could be gathered in the same time.
_BUCKET_BLOCKS = 64
# Prefill chunks share a bucket up to this many attention scores, at most half of them padding.
_BUCKET_SCORES = 1 << 18


class ModelRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: BatchSlots,
        tables: BlockTables,
        cache: KVCache,
        bank: AdapterBank | None = None,
        routes: RoutesPool | None = None,
        flashes: bool = False,
    ) -> None:
        """`flashes`: prefill passes may use PrefillLayer, because the layers know their caches."""
        self._bank = bank
        self._routes = routes
        self._model = model
        self._device = model.device
        self._slots = slots
        self._tables = tables
        self._cache = cache
        self._flashes = flashes

    def forward(self, plan: BatchPlan) -> Tensor:
        """Compute the plan's tokens; returns the hidden state of each row's last one, [R, D]."""
        if self._routes is not None:
            self._routes.fetch()
        if len(plan.copy_sources):
            self._cache.copy(plan.copy_sources, plan.copy_targets)
        starts = self._slots.num_cached[plan.slots]
        slots, positions = _flatten(plan, starts)
        slot_mapping = self._tensor(self._tables.kv_slots(slots, positions))
        if self._routes is not None:
            self._routes.begin(slot_mapping)
        batch: PrefillLayer | PagedBatch
        if self._flashes and plan.num_single == 0:
            batch = self._flash_prefill(plan, starts, slot_mapping=slot_mapping)
        else:
            batch = PagedBatch(
                cache=self._cache, slot_mapping=slot_mapping, buckets=self._buckets(plan, starts)
            )
        if self._bank is not None:
            self._bank.choose(self._tensor(self._slots.adapters[slots]))
        hidden = hidden_states(
            self._model,
            input_ids=self._tensor(self._slots.tokens[slots, positions])[None],
            position_ids=self._tensor(positions)[None],
            millrace_paged=batch,
        )
        if plan.num_single == len(plan.slots):
            return hidden
        return hidden[self._tensor(np.cumsum(plan.counts) - 1)]

    def _flash_prefill(
        self, plan: BatchPlan, starts: np.ndarray, *, slot_mapping: Tensor
    ) -> PrefillLayer:
        lengths = starts + plan.counts
        context_slots = np.empty(0, dtype=np.int64)
        if starts.any():
            slots = np.repeat(plan.slots, lengths)
            at = np.arange(len(slots)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            context_slots = self._tables.kv_slots(slots, at)
        return PrefillLayer(
            cache=self._cache.layers[0],
            slot_mapping=slot_mapping,
            context_slots=self._tensor(context_slots),
            query_starts=self._tensor(np.cumsum([0, *plan.counts])).int(),
            context_starts=self._tensor(np.cumsum([0, *lengths])).int(),
            max_queries=int(plan.counts.max()),
            max_context=int(lengths.max()),
        )

    def _buckets(self, plan: BatchPlan, starts: np.ndarray) -> tuple[Bucket, ...]:
        buckets = []
        sizes = starts[: plan.num_single] // self._tables.block_tokens + 1
        first = 0
        for last in _split(sizes):
            blocks = self._tables.rows[plan.slots[first:last], : sizes[last - 1]]
            positions = starts[first:last, None]
            buckets.append(
                Bucket(
                    start=first,
                    stop=last,
                    blocks=self._tensor(blocks.reshape(-1)),
                    positions=self._tensor(positions),
                )
            )
            first = last
        token = plan.num_single
        for first, last in _prefill_runs(plan, starts):
            bucket = self._prefill_bucket(plan, starts, first=first, last=last, token=token)
            buckets.append(bucket)
            token = bucket.stop
        return tuple(buckets)

    def _prefill_bucket(
        self, plan: BatchPlan, starts: np.ndarray, *, first: int, last: int, token: int
    ) -> Bucket:
        """Rows first..last of the plan, whose tokens begin at `token`."""
        starts, counts = starts[first:last], plan.counts[first:last]
        num_blocks = self._tables.blocks_for(int((starts + counts).max()))
        blocks = self._tables.rows[plan.slots[first:last], :num_blocks]
        # [S, Q]; places beyond a row's own tokens repeat its last one, and are thrown away.
        places = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        offsets = np.cumsum(counts) - counts
        padded = unpadded = None
        if (counts != counts[0]).any():
            padded = self._tensor(offsets[:, None] + places)
            real = np.arange(counts.max()) < counts[:, None]
            unpadded = self._tensor(np.flatnonzero(real))
        return Bucket(
            start=token,
            stop=token + int(counts.sum()),
            blocks=self._tensor(blocks.reshape(-1)),
            positions=self._tensor(starts[:, None] + places),
            padded=padded,
            unpadded=unpadded,
            fresh=len(starts) == 1 and int(starts[0]) == 0,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _flatten(plan: BatchPlan, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slot, position) of each token of the pass, [T] each."""
    if plan.num_single == len(plan.slots):
        return plan.slots, starts
    slots = np.repeat(plan.slots, plan.counts)
    within = np.arange(len(slots)) - np.repeat(np.cumsum(plan.counts) - plan.counts, plan.counts)
    return slots, np.repeat(starts, plan.counts) + within


def _split(sizes: np.ndarray) -> list[int]:
    """Ends of the buckets for ascending sizes [S] in blocks.

    Each row of a bucket is padded to its largest, so a cut saves what the rows below it no longer
    carry; it is made where it saves most, as long as that is worth another bucket.
    """
    if not len(sizes):
        return []
    saved = np.arange(1, len(sizes) + 1) * (sizes[-1] - sizes)
    cut = int(saved.argmax()) + 1
    if saved[cut - 1] <= _BUCKET_BLOCKS:
        return [len(sizes)]
    return _split(sizes[:cut]) + [cut + end for end in _split(sizes[cut:])]


def _prefill_runs(plan: BatchPlan, starts: np.ndarray) -> list[tuple[int, int]]:
    """(first, last) rows of the prefill buckets: neighbours whose common padding is cheap."""
    runs: list[tuple[int, int]] = []
    longest = context = scores = 0
    for row in range(plan.num_single, len(plan.slots)):
        count = int(plan.counts[row])
        end = int(starts[row]) + count
        if runs:
            first, last = runs[-1]
            padded = (last + 1 - first) * max(longest, count) * max(context, end)
            if padded <= min(2 * (scores + count * end), _BUCKET_SCORES):
                runs[-1] = (first, last + 1)
                longest, context = max(longest, count), max(context, end)
                scores += count * end
                continue
        runs.append((row, row + 1))
        longest, context, scores = count, end, count * end
    return runs
