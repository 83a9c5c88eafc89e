"""The tensors of the decode loop, at fixed addresses, so that CUDA graphs of its steps stay valid.

The engine's thread calls everything. B = rows of a step, R = slots of a launch, N = its steps,
V = vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded import sampler
from millrace.inference.embedded.decode import splits
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.parts import EngineParts
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import NO_TOKEN


class DecodeState:
    """The tensors of the loop: inputs from the host, values that steps advance, and outputs. A
    launch starts with load(), which overwrites everything, so nothing has to be kept in sync with
    the host between launches. Values that are sent together lie together: the number of transfers
    costs the host more than their bytes."""

    def __init__(self, parts: EngineParts, *, max_rows: int, eos_ids: Sequence[int]) -> None:
        device, sizes, max_steps = parts.model.device, parts.sizes, parts.sizes.decode_steps
        max_blocks = parts.tables.rows.shape[1]
        vocab_size = parts.model.config.get_text_config().vocab_size
        self._kept_capacity = sampler.row_capacity(sizes.kept_capacity, vocab_size=vocab_size)
        self._eos_ids = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        self._integers = torch.zeros(7, max_rows, dtype=torch.int64, device=device)
        self._floats = torch.ones(3, max_rows, dtype=torch.float32, device=device)
        # The token to feed next, the row's length with it (0 = idle), its index in the completion.
        self.tokens, self.lengths, positions = self._integers[:3]
        settings = self._integers[3:]  # as in BatchSlots
        self.limits, _, _, self.adapters = settings
        self.sampling = sampler.SamplingBatch.of(settings, self._floats, positions=positions)
        self.tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        # The work of attention, see splits.py.
        self.num_heads = max(shape.num_heads for shape in parts.cache.shapes.values())
        most = splits.max_splits(num_rows=max_rows, num_heads=self.num_heads)
        self.splits = torch.zeros(most, 4, dtype=torch.int32, device=device)
        # Zeros between steps: the last split of a row resets its own.
        self.arrivals = torch.zeros(max_rows, self.num_heads, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._out = torch.zeros(max_steps, 2, max_rows, dtype=torch.int32, device=device)
        self._out_num_kept = torch.zeros(max_steps, max_rows, dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        self._grammar: tuple[Tensor, Tensor, Tensor] | None = None
        self._advance: Callable[..., None] = _advance
        self._mask_logits: Callable[[Tensor, Tensor], Tensor] = sampler.mask_logits
        if parts.compiles:
            self._advance = torch.compile(_advance)
            self._mask_logits = torch.compile(sampler.mask_logits)

    def load(self, chosen: np.ndarray, slots: BatchSlots, tables: BlockTables) -> None:
        """Start a launch with these slots in the first rows; the other rows are idle."""
        count = len(chosen)
        lengths = slots.num_tokens[chosen]
        integers = np.zeros(self._integers.shape, dtype=np.int64)
        integers[0, :count] = slots.tokens[chosen, lengths - 1]
        integers[1, :count] = lengths
        integers[2, :count] = lengths - slots.num_prompt[chosen]
        integers[3:, :count] = slots.integers[:, chosen]
        floats = np.ones(self._floats.shape, dtype=np.float32)
        floats[:, :count] = slots.floats[:, chosen]
        width = int(tables.sizes[chosen].max())
        blocks = tables.rows[chosen, :width].astype(np.int32)
        _send(integers, self._integers)
        _send(floats, self._floats)
        _send(blocks, self.tables[:count, :width])
        self.step.zero_()

    def load_splits(self, counts: np.ndarray, *, num_rows: int, num_splits: int) -> None:
        """The splits of a launch in which the first rows have these counts."""
        plan = splits.plan_splits(counts, num_rows=num_rows, num_splits=num_splits)
        _send(plan, self.splits[:num_splits])

    def set_idle(self, *, num_rows: int, num_splits: int) -> None:
        """Make every row idle: a step then writes nothing to the cache."""
        self.load_splits(np.empty(0, dtype=np.int64), num_rows=num_rows, num_splits=num_splits)
        self.lengths.zero_()
        self.step.zero_()

    def grammar(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, V], masks [B, V / 32] int32 and pinned masks; made outside of CUDA graphs."""
        if self._grammar is None:
            device, max_rows = self._out.device, len(self.tables)
            logits = torch.zeros(max_rows, self._vocab_size, device=device)
            masks = torch.zeros(max_rows, -(-self._vocab_size // 32), dtype=torch.int32)
            host = masks.pin_memory() if device.type == "cuda" else masks.clone()
            self._grammar = logits, masks.to(device), host
        return self._grammar

    def keep_logits(self, logits: Tensor) -> None:
        """Keep them for masked_logits(). Both run inside CUDA graphs."""
        self.grammar()[0][: len(logits)] = logits

    def masked_logits(self, num_rows: int) -> Tensor:
        logits, masks, _ = self.grammar()
        return self._mask_logits(logits[:num_rows], masks[:num_rows])

    def load_masks(self, fill: Callable[[np.ndarray], Any], *, count: int) -> None:
        """The ids that the next samples of the first rows may be: fill() writes [count, V / 32]."""
        _, masks, host = self.grammar()
        fill(host[:count].numpy())
        masks[:count].copy_(host[:count], non_blocking=True)

    def advance(self, drawn: sampler.StepSample, *, num_rows: int) -> None:
        """Record the sample of one step. Runs inside CUDA graphs: no shape depends on a value."""
        if drawn.kept is not None and drawn.num_kept is not None:
            self._out_kept[:, :num_rows].index_copy_(0, self.step, drawn.kept[None])
            self._out_num_kept[:, :num_rows].index_copy_(0, self.step, drawn.num_kept[None])
        self._advance(
            self.tokens[:num_rows],
            self.lengths[:num_rows],
            self.limits[:num_rows],
            self.sampling.positions[:num_rows],
            self.step,
            self._out[:, :, :num_rows],
            drawn.tokens,
            drawn.logprobs,
            self._eos_ids,
        )

    def read(self, count: int, *, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logprobs [N, count] of the launch; NO_TOKEN where a row had ended."""
        out = self._out[:num_steps, :, :count].cpu().numpy()
        return out[:, 0], out[:, 1].view(np.float32)

    def read_kept(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The kept ids of the tokens [N, count] that read() returned, row after row, and how many
        belong to each token [count, N]."""
        num_steps, count = tokens.shape
        sizes = self._out_num_kept[:num_steps, :count].T.cpu().numpy() * (tokens.T != NO_TOKEN)
        rows = self._out_kept[:num_steps, :count].transpose(0, 1)
        return sampler.joined_rows(rows, sizes), sizes

    @cached_property
    def _out_kept(self) -> Tensor:  # [N, B, capacity] int32; made when first needed
        shape = (*self._out_num_kept.shape, self._kept_capacity)
        return torch.zeros(shape, dtype=torch.int32, device=self._out.device)


def _advance(
    tokens: Tensor,  # [B]; this and the next five are written
    lengths: Tensor,
    limits: Tensor,
    positions: Tensor,
    step: Tensor,  # [1]
    out: Tensor,  # [N, 2, B] int32; tokens, and the bits of logprobs
    drawn: Tensor,  # [B] int64
    logprobs: Tensor,  # [B] float32
    eos_ids: Tensor,
) -> None:
    counts = lengths > 0
    tokens_out = torch.where(counts, drawn, NO_TOKEN).int()
    out.index_copy_(0, step, torch.stack([tokens_out, logprobs.view(torch.int32)])[None])
    ends = (drawn[:, None] == eos_ids).any(1) | (lengths + 1 >= limits)
    lengths.copy_(torch.where(counts & ~ends, lengths + 1, 0))
    tokens.copy_(drawn)
    positions.add_(1)
    step.add_(1)


def _send(array: np.ndarray, target: Tensor) -> None:
    tensor = torch.from_numpy(array)
    if target.is_cuda:
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)
