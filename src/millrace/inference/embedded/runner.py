"""Runs the model on a plan: a flat batch of tokens in, the hidden states of its rows out.

R = rows (slots) of the plan, T = tokens of the pass, D = hidden size.
The engine's thread calls everything.
"""

import warnings
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.decode.attention import PrefillLayer, can_flash
from millrace.inference.embedded.kv.paged_attention import Bucket, ExactBatch, PagedBatch
from millrace.inference.embedded.kv.states import SequenceGroup, groups_of
from millrace.inference.embedded.parts import EngineParts
from millrace.inference.embedded.scheduling.batch_slots import within
from millrace.inference.embedded.scheduling.sequence import BatchPlan
from millrace.models.directory import attention_chunk
from millrace.models.exact.attention import KeyTables, Tiles
from millrace.models.loading import hidden_states

# The cost of one more bucket per layer, in KV blocks that could be gathered in the same time.
_BUCKET_BLOCKS = 64
# Prefill chunks share a bucket up to this many attention scores, at most half of them padding.
_BUCKET_SCORES = 1 << 18


class ModelRunner:
    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._device = parts.model.device  # transformers searches the parameters for it
        self._slots = parts.slots
        self._tables = parts.tables
        self._exact = parts.sizes.exact
        # PrefillLayer needs layers that know their caches.
        has_loop = parts.sizes.decode_steps > 1 and not self._exact
        self._flashes = has_loop and can_flash(parts.cache, model=parts.model)
        context = parts.sizes.usable_context
        self._flash_context = attention_chunk(parts.model.config.get_text_config()) or context
        if self._flashes and self._flash_context < context:
            warnings.warn(
                f"Prompts beyond {self._flash_context} tokens do not use the flash kernel in"
                " prefill, because the model attends within chunks of the context; they take"
                " several times as long.",
                stacklevel=2,
            )

    def forward(self, plan: BatchPlan) -> Tensor:
        """Compute the plan's tokens; returns the hidden state of each row's last token, [R, D], or
        of all tokens [T, D] if there are drafts."""
        parts = self._parts
        parts.begin_pass(plan)
        starts = self._slots.num_cached[plan.slots]
        slots, positions = plan.slots, starts  # of each token of the pass, [T]
        if plan.num_single < len(plan.slots):
            slots = np.repeat(plan.slots, plan.counts)
            positions = np.repeat(starts, plan.counts) + within(plan.counts)
        slot_mapping = self._tensor(self._tables.kv_slots(slots, positions))
        if parts.routes is not None:
            parts.routes.kv_slots = slot_mapping
        batch: PrefillLayer | PagedBatch | ExactBatch
        if self._exact:
            rows, block = self._tables.rows[plan.slots], self._tables.block_tokens
            offsets = self._tensor(np.arange(len(rows)) * rows.shape[1])
            tables = KeyTables(self._tensor(rows.reshape(-1)), offsets, block)
            tiles = Tiles.of(starts, plan.counts, tables=tables, device=self._device)
            batch = ExactBatch(cache=parts.cache, slot_mapping=slot_mapping, tiles=tiles)
        elif self._flashes and plan.num_single == 0 and self._is_short(starts + plan.counts):
            batch = self._flash_prefill(plan, starts, slot_mapping=slot_mapping)
        else:
            groups: tuple[SequenceGroup, ...] = ()
            if parts.states is not None:
                copies = {"snapshots": plan.snapshots, "device": self._device}
                groups = groups_of(plan.slots, starts, plan.counts, **copies)
            batch = PagedBatch(
                cache=parts.cache,
                slot_mapping=slot_mapping,
                buckets=self._buckets(plan, starts),
                states=parts.states,
                groups=groups,
            )
        if parts.bank is not None:
            parts.bank.choose(self._tensor(self._slots.adapters[slots]))
        hidden = hidden_states(
            parts.model,
            input_ids=self._tensor(self._slots.tokens[slots, positions])[None],
            position_ids=self._tensor(positions)[None],
            millrace_paged=batch,
        )
        if plan.num_single == len(plan.slots) or plan.drafts is not None:
            return hidden
        return hidden[self._tensor(np.cumsum(plan.counts) - 1)]

    def _is_short(self, lengths: np.ndarray) -> bool:
        return int(lengths.max()) <= self._flash_context

    def _flash_prefill(
        self, plan: BatchPlan, starts: np.ndarray, *, slot_mapping: Tensor
    ) -> PrefillLayer:
        lengths = starts + plan.counts
        context_slots = np.empty(0, dtype=np.int64)
        if starts.any():
            context_slots = self._tables.kv_slots(np.repeat(plan.slots, lengths), within(lengths))
        return PrefillLayer(
            cache=self._parts.cache.layers[0],
            slot_mapping=slot_mapping,
            context_slots=self._tensor(context_slots),
            query_starts=self._tensor(np.cumsum([0, *plan.counts])).int(),
            context_starts=self._tensor(np.cumsum([0, *lengths])).int(),
            max_queries=int(plan.counts.max()),
            max_context=int(lengths.max()),
        )

    def _buckets(self, plan: BatchPlan, starts: np.ndarray) -> tuple[Bucket, ...]:
        sizes = starts[: plan.num_single] // self._tables.block_tokens + 1
        runs = [*pairwise([0, *_split(sizes)]), *_prefill_runs(plan, starts)]
        return tuple(self._bucket(plan, starts, slice(*run)) for run in runs)

    def _bucket(self, plan: BatchPlan, starts: np.ndarray, rows: slice) -> Bucket:
        """These rows of the plan."""
        starts, counts = starts[rows], plan.counts[rows]
        num_blocks = self._tables.blocks_for(int((starts + counts).max()))
        blocks = self._tables.rows[plan.slots[rows], :num_blocks]
        # [S, Q]; padding repeats the last token of its row, and its output is dropped.
        columns = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        padded = unpadded = None
        if (counts != counts[0]).any():
            padded = self._tensor((np.cumsum(counts) - counts)[:, None] + columns)
            unpadded = self._tensor(np.flatnonzero(np.arange(counts.max()) < counts[:, None]))
        return Bucket(
            num_tokens=int(counts.sum()),
            blocks=self._tensor(blocks.reshape(-1)),
            positions=self._tensor(starts[:, None] + columns),
            padded=padded,
            unpadded=unpadded,
            fresh=len(starts) == 1 and int(starts[0]) == 0,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _split(sizes: np.ndarray) -> list[int]:
    """Ends of the buckets for ascending sizes [S] in blocks. Each row of a bucket is padded to the
    largest, so a cut saves the padding of the rows below it. The cut is made where it saves most,
    if that is worth another bucket."""
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
