"""The decode loop: several decode steps on the device per round trip to the host.

The host chooses the slots and reads the sampled tokens. In between, the device feeds itself its own
tokens and detects rows that end (eos token, length). Such rows idle until the launch ends, so a
launch is short while other sequences wait. Steps run as CUDA graphs, captured once per shape, over
tensors at fixed addresses, so that they stay valid across swaps. Elsewhere a step simply runs.

Promise: tokens, logprobs, kept ids and routes of a slot equal those of single steps.

The engine's thread calls everything. B = rows of a step, R = slots of a launch, N = its steps,
K = kept ids, W = blocks per row.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded import sampler
from millrace.inference.embedded.decode.attention import DecodeLayer
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.paged_attention import ExactBatch
from millrace.inference.embedded.parts import EngineParts
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import NO_TOKEN, DecodePlan, DecodeResult
from millrace.models.exact.attention import Tiles
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits

_WARMUPS = 2  # steps before a capture: the first one compiles and allocates buffers
_MIN_ROWS = 8  # fewer cost the same, and compiled code treats 0 and 1 as special
_AHEAD = 2  # steps queued on the device: it never waits for the host, and a launch can end soon
_PROGRAMS = 512  # attention programs that keep a GPU busy, about
_SPLIT_TOKENS = 2048  # of context per split, at most
_MAX_SPLITS = 64


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
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._out = torch.zeros(max_steps, 2, max_rows, dtype=torch.int32, device=device)
        self._out_num_kept = torch.zeros(max_steps, max_rows, dtype=torch.int32, device=device)
        self._out_kept: Tensor | None = None  # [N, B, capacity] int32; made when first needed
        self._vocab_size = vocab_size
        self._grammar: tuple[Tensor, Tensor, Tensor] | None = None
        self._advance: Callable[..., None] = _advance
        self._mask_logits: Callable[[Tensor, Tensor], Tensor] = sampler.mask_logits
        if sizes.compile_layers:
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
        self._step.zero_()

    def set_idle(self) -> None:
        """Make every row idle: a step then writes nothing to the cache."""
        self.lengths.zero_()
        self._step.zero_()

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
        rows = self._kept()[:num_steps, :count].transpose(0, 1)
        return sampler.joined_rows(rows, sizes), sizes

    def _kept(self) -> Tensor:
        if self._out_kept is None:
            shape = (*self._out_num_kept.shape, self._kept_capacity)
            self._out_kept = torch.zeros(shape, dtype=torch.int32, device=self._out.device)
        return self._out_kept


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


class StepShape(NamedTuple):
    """What a captured graph of a step is specific to."""

    num_rows: int
    splits: int  # see DecodeLayer
    truncates: bool
    is_guided: bool  # some rows have a grammar


class DecodeLoop:
    def __init__(self, parts: EngineParts, *, eos_ids: Sequence[int]) -> None:
        """`parts`: with a model that layers.prepare() has changed."""
        self.max_steps = parts.sizes.decode_steps
        self._parts = parts
        self._kept_capacity = parts.sizes.kept_capacity
        self._is_exact = parts.sizes.exact
        self._device = parts.model.device
        self._sizes = row_sizes(len(parts.slots.occupied))
        self._state = DecodeState(parts, max_rows=self._sizes[-1], eos_ids=eos_ids)
        # Without CUDA there is no pool, and steps simply run.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        # The parts of a step: with grammars one up to the logits, and one from the masks on.
        self._steps: dict[StepShape, list[Callable[[], None]]] = {}

    def warm_up(self) -> None:
        """Capture plain steps of powers of two rows; a start would wait long for all others."""
        with self._parts.numerics():
            for num_rows in reversed(self._sizes):  # largest first: the others fit into its memory
                if num_rows == self._sizes[-1] or not num_rows & (num_rows - 1):
                    splits = self._splits(num_rows, 0)
                    self._prepare(StepShape(num_rows, splits, truncates=False, is_guided=False))

    def run(
        self,
        plan: DecodePlan,
        *,
        should_stop: Callable[[], bool],
        while_running: Callable[[], None],
        masks: Callable[[np.ndarray], Any],
    ) -> DecodeResult:
        """Sample up to plan.num_steps tokens for each slot; its last token is not yet cached. The
        launch ends a few steps after should_stop() returns True. while_running() is called once
        while the device works, and so is masks() if a slot has a grammar: it fills [R, V / 32]."""
        slots, count = self._parts.slots, len(plan.slots)
        self._parts.begin_pass(plan)
        num_rows = next(size for size in self._sizes if size >= count)
        context = int(slots.num_tokens[plan.slots].max()) + plan.num_steps
        truncates = bool(slots.truncates[plan.slots].any())
        is_guided = bool(slots.is_guided[plan.slots].any())
        assert plan.num_steps == 1 or not is_guided
        shape = StepShape(num_rows, self._splits(num_rows, context), truncates, is_guided)
        self._prepare(shape)
        self._state.load(plan.slots, slots, self._parts.tables)
        first, *rest = self._steps[shape]
        launched: deque[torch.Event] = deque()  # at most _AHEAD steps are queued on the device
        num_steps = 0
        while num_steps < plan.num_steps and not (num_steps > 0 and should_stop()):
            first()
            for part in rest:
                self._state.load_masks(masks, count=count)
                part()
            if num_steps == 0:
                while_running()
            num_steps += 1
            if self._device.type == "cuda":
                launched.append(torch.cuda.current_stream(self._device).record_event())
                if len(launched) > _AHEAD:
                    launched.popleft().synchronize()
        tokens, logprobs = self._state.read(count, num_steps=num_steps)
        kept, num_kept = self._state.read_kept(tokens) if truncates else (None, None)
        return DecodeResult(tokens, logprobs, (tokens != NO_TOKEN).sum(0), kept, num_kept)

    def _prepare(self, shape: StepShape) -> None:
        """Capture graphs of this shape, if there are none. Everything they compute is garbage."""
        if shape in self._steps:
            return
        parts = [lambda: self._sample(shape, self._logits(shape))]
        if shape.is_guided:
            self._state.grammar()
            parts = [
                lambda: self._state.keep_logits(self._logits(shape)),
                lambda: self._sample(shape, self._state.masked_logits(shape.num_rows)),
            ]
        if self._pool is not None:
            self._state.set_idle()
            parts = [self._captured(part) for part in parts]
        self._steps[shape] = parts

    def _captured(self, part: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                part()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because a staging thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            part()
        return graph.replay

    def _logits(self, shape: StepShape) -> Tensor:  # [B, V]
        """Feed the newest token of each row. Runs inside CUDA graphs."""
        state, num_rows, model = self._state, shape.num_rows, self._parts.model
        cache, lengths = self._parts.cache, state.lengths[:num_rows]
        if self._parts.bank is not None:
            self._parts.bank.choose(state.adapters[:num_rows])
        if self._parts.routes is not None:
            self._parts.routes.begin_step(state.tables[:num_rows], lengths)
        hidden = hidden_states(
            model,
            input_ids=state.tokens[None, :num_rows],
            position_ids=(lengths - 1).clamp_min(0)[None],
            millrace_paged=self._exact_batch(num_rows)
            if self._is_exact
            else DecodeLayer(
                cache=cache.layers[0],
                tables=state.tables,
                lengths=state.lengths,
                block_tokens=cache.block_tokens,
                splits=shape.splits,
            ),
        )
        return final_logits(model, hidden.to(model.dtype))

    def _sample(self, shape: StepShape, logits: Tensor) -> None:
        """Draw the next token of each row. Runs inside CUDA graphs."""
        rows = self._state.sampling.first(shape.num_rows, truncates=shape.truncates)
        drawn = sampler.sample_step(logits, rows, capacity=self._kept_capacity)
        if self._is_exact:
            drawn = sampler.with_exact_logprobs(drawn, logits, rows.temperatures)
        self._state.advance(drawn, num_rows=shape.num_rows)

    def _exact_batch(self, num_rows: int) -> ExactBatch:
        tables, lengths = self._state.tables[:num_rows], self._state.lengths[:num_rows]
        cache, positions = self._parts.cache, (lengths - 1).clamp_min(0)
        tiles = Tiles.single(positions, lengths, tables=tables, block=cache.block_tokens)
        slots = tiles.tables.slots(tiles.sequences, positions[:, None])[:, 0].long()
        slots = torch.where(lengths > 0, slots, -1)
        return ExactBatch(cache=cache, slot_mapping=slots, tiles=tiles)

    def _splits(self, num_rows: int, context: int) -> int:
        """Enough splits to fill the GPU and to keep a long row from outlasting all others."""
        num_heads = max(shape.num_heads for shape in self._parts.cache.shapes.values())
        to_fill = _PROGRAMS // (num_rows * num_heads)
        to_share = context // _SPLIT_TOKENS
        wanted = min(max(to_fill, to_share, 1), _MAX_SPLITS)
        return 1 << (wanted - 1).bit_length()


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which steps are captured; at most a third of the rows is padding."""
    sizes = [_MIN_ROWS]
    while sizes[-1] < max_rows:
        step = max(8, 1 << (sizes[-1].bit_length() - 2))
        sizes.append(sizes[-1] + step)
    return sizes
