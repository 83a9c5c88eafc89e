"""The tensors of the decode loop: what the host sends, what steps advance, what the host reads.

All tensors have fixed addresses and are allocated once, so that captured CUDA graphs stay valid. A
launch starts with load(), which overwrites everything, so nothing has to be kept in sync with the
host between launches. Values that travel together lie together, because a transfer costs the host
more than its bytes.

B = rows, W = blocks per row, N = steps of a launch.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.decode.sampling import StepSample
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.sampler import SamplingTensors
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots

NO_TOKEN = -1  # in the place of a token: the row had ended


class DecodeState:
    """Used by the engine's thread."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        max_steps: int,
        kept_capacity: int,
        eos_ids: Tensor,
        device: torch.device,
        compiles: bool,
    ) -> None:
        self._kept_capacity = kept_capacity
        self._eos_ids = eos_ids
        self._integers = torch.zeros(7, max_rows, dtype=torch.int64, device=device)
        self._floats = torch.ones(3, max_rows, dtype=torch.float32, device=device)
        # To feed next; the row's tokens with that one (0 = idle); where it ends.
        self.tokens, self.lengths, self.limits = self._integers[:3]
        self.sampling = SamplingTensors(
            keys=self._integers[3],
            positions=self._integers[4],
            top_k=self._integers[5],
            temperatures=self._floats[0],
            top_p=self._floats[1],
            min_p=self._floats[2],
        )
        self.adapters = self._integers[6]  # slots of the adapter bank
        self.tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._out = torch.zeros(max_steps, 2, max_rows, dtype=torch.int32, device=device)
        self._out_num_kept = torch.zeros(max_steps, max_rows, dtype=torch.int32, device=device)
        self._out_kept: Tensor | None = None  # [N, B, capacity] int32; made when first needed
        self._advance: Callable[..., None] = torch.compile(_advance) if compiles else _advance

    def load(
        self, chosen: np.ndarray, slots: BatchSlots, tables: BlockTables, *, num_rows: int
    ) -> None:
        """Begin a round with these slots in the first rows; the others up to num_rows are idle."""
        count = len(chosen)
        lengths = slots.num_tokens[chosen]
        integers = np.zeros(self._integers.shape, dtype=np.int64)
        integers[0, :count] = slots.tokens[chosen, lengths - 1]
        integers[1, :count] = lengths
        integers[2, :count] = slots.limits[chosen]
        integers[3, :count] = slots.keys[chosen]
        integers[4, :count] = lengths - slots.num_prompt[chosen]
        integers[5, :count] = slots.top_k[chosen]
        integers[6, :count] = slots.adapters[chosen]
        floats = np.ones(self._floats.shape, dtype=np.float32)
        floats[0, :count] = slots.temperatures[chosen]
        floats[1, :count] = slots.top_p[chosen]
        floats[2, :count] = slots.min_p[chosen]
        width = int(tables.sizes[chosen].max())
        blocks = tables.rows[chosen, :width].astype(np.int32)
        _send(integers, self._integers)
        _send(floats, self._floats)
        _send(blocks, self.tables[:count, :width])
        self._step.zero_()

    def set_idle(self) -> None:
        """Make every row idle: a step then writes nothing to the cache."""
        self.lengths.zero_()
        self._step.zero_()

    def advance(self, drawn: StepSample, *, num_rows: int) -> None:
        """Take note of one step's draw. Runs inside CUDA graphs: no shape depends on a value."""
        if drawn.kept is not None and drawn.num_kept is not None:
            self._kept()[:, :num_rows].index_copy_(0, self._step, drawn.kept[None])
            self._out_num_kept[:, :num_rows].index_copy_(0, self._step, drawn.num_kept[None])
        self._advance(
            self.tokens[:num_rows],
            self.lengths[:num_rows],
            self.limits[:num_rows],
            self.sampling.positions[:num_rows],
            self._step,
            self._out[:, :, :num_rows],
            drawn.tokens,
            drawn.logprobs,
            drawn.num_kept,
            self._eos_ids,
            self._kept_capacity,
        )

    def read(self, count: int, *, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logprobs [N, count] of the round so far; NO_TOKEN where a row had ended."""
        out = self._out[:num_steps, :, :count].cpu().numpy()
        return out[:, 0], out[:, 1].view(np.float32)

    def read_kept(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of what read() returned: all kept ids, row after row, and how many belong to each token
        [count, N]."""
        num_steps, count = tokens.shape
        sizes = self._out_num_kept[:num_steps, :count].T.cpu().numpy() * (tokens.T != NO_TOKEN)
        places = torch.arange(self._kept_capacity, device=self._out.device)
        sizes_there = torch.from_numpy(sizes).to(self._out.device)
        ids = self._kept()[:num_steps, :count].transpose(0, 1)[places < sizes_there[..., None]]
        return ids.cpu().numpy(), sizes

    def _kept(self) -> Tensor:
        if self._out_kept is None:
            shape = (*self._out_num_kept.shape, self._kept_capacity)
            self._out_kept = torch.zeros(shape, dtype=torch.int32, device=self._out.device)
        return self._out_kept


def _advance(
    tokens: Tensor,  # [B]; this and the next five are written
    lengths: Tensor,
    limits: Tensor,
    indices: Tensor,
    step: Tensor,  # [1]
    out: Tensor,  # [N, 2, B] int32; tokens, and the bits of logprobs
    drawn: Tensor,  # [B] int64
    logprobs: Tensor,  # [B] float32
    num_kept: Tensor | None,  # [B] int32
    eos_ids: Tensor,
    kept_capacity: int,
) -> None:
    counts = lengths > 0
    if num_kept is not None:
        # What does not fit is drawn again, by the host's own sampler.
        counts = counts & (num_kept <= kept_capacity)
    told = torch.stack([torch.where(counts, drawn, NO_TOKEN).int(), logprobs.view(torch.int32)])
    out.index_copy_(0, step, told[None])
    ends = (drawn[:, None] == eos_ids).any(1) | (lengths + 1 >= limits)
    lengths.copy_(torch.where(counts & ~ends, lengths + 1, 0))
    tokens.copy_(drawn)
    indices.add_(1)
    step.add_(1)


def _send(array: np.ndarray, target: Tensor) -> None:
    tensor = torch.from_numpy(array)
    if target.is_cuda:
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)
