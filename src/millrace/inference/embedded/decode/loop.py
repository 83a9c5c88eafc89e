"""The decode loop: several decode steps on the device per round trip to the host.

The host chooses the slots and reads the sampled tokens. In between, the device feeds itself its own
tokens and detects rows that end (eos token, length). Such rows idle until the launch ends, so a
launch is short while other sequences wait. Steps run as CUDA graphs, captured once per shape: a
replay costs the host one call instead of hundreds. Weights and state live at fixed addresses, so
graphs stay valid across weight swaps. On other devices a step simply runs.

Promise: tokens, logprobs, kept ids and routes of a slot equal those of single steps.

The engine's thread calls everything. R = slots of a launch, N = its steps, K = kept ids.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.attention import DecodeLayer
from millrace.inference.embedded.decode.sampling import sample_step
from millrace.inference.embedded.decode.state import NO_TOKEN, DecodeState
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.cache import KVCache
from millrace.inference.embedded.lora.bank import AdapterBank
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import DecodePlan
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits

_WARMUPS = 2  # passes before a capture: the first one compiles, and allocates what stays


class StepShape(NamedTuple):
    """What the work of a step depends on, besides the values in its tensors."""

    num_rows: int
    splits: int  # see DecodeLayer
    truncates: bool


class StepGraphs:
    """Used by the engine's thread."""

    def __init__(self, step: Callable[[StepShape], None], *, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __contains__(self, shape: StepShape) -> bool:
        """True if run(shape) needs no capture."""
        return self._pool is None or shape in self._graphs

    def capture(self, shape: StepShape) -> None:
        """Make run(shape) possible. The step runs a few times; whatever it wrote is garbage."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self._step(shape)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because a thread that stages weights may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(shape)
        self._graphs[shape] = graph

    def run(self, shape: StepShape) -> None:
        if self._pool is None:
            self._step(shape)
            return
        self._graphs[shape].replay()


_MIN_ROWS = 8  # fewer cost the same, and compiled code treats 0 and 1 as special
_AHEAD = 2  # steps queued on the device: it never waits for the host, and a round soon ends
_PROGRAMS = 512  # attention programs that keep a GPU busy, about
_SPLIT_TOKENS = 2048  # of context per split, at most
_MAX_SPLITS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodeResult:
    """What the slots of a round sampled: the first `counts` entries of each column."""

    tokens: np.ndarray  # [N, R] int32
    logprobs: np.ndarray  # [N, R] float32
    counts: np.ndarray  # [R] int64
    # If some slots truncate: ids [K] int32, step after step and in each slot after slot, and how
    # many of them belong to each token, [N, R] int32; 0 = nothing was ruled out.
    kept: np.ndarray | None
    num_kept: np.ndarray | None


class DecodeLoop:
    def __init__(
        self,
        model: PreTrainedModel,  # made ready by layers.prepare
        *,
        slots: BatchSlots,
        tables: BlockTables,
        cache: KVCache,
        eos_ids: Sequence[int],
        max_steps: int,
        kept_capacity: int,  # ids per token; a slot that kept more is left to single steps
        compiles: bool,
        bank: AdapterBank | None = None,
        routes: RoutesPool | None = None,
    ) -> None:
        self._bank = bank
        self._routes = routes
        self._kept_capacity = kept_capacity
        self.max_steps = max_steps
        self._model = model
        self._device = model.device
        self._slots = slots
        self._tables = tables
        self._cache = cache
        self._sizes = row_sizes(len(slots.occupied))
        self._state = DecodeState(
            max_rows=self._sizes[-1],
            max_blocks=tables.rows.shape[1],
            max_steps=max_steps,
            kept_capacity=kept_capacity,
            eos_ids=torch.tensor(list(eos_ids), dtype=torch.int64, device=model.device),
            device=model.device,
            compiles=compiles,
        )
        self._graphs = StepGraphs(self._step, device=model.device)

    def warm_up(self) -> None:
        """Capture what a run needs at once: every number of rows, without truncation."""
        for num_rows in reversed(self._sizes):  # largest first: the others fit into its memory
            self._prepare(
                StepShape(num_rows=num_rows, splits=self._splits(num_rows, 0), truncates=False)
            )

    def run(
        self,
        plan: DecodePlan,
        *,
        should_stop: Callable[[], bool],
        while_running: Callable[[], None],
    ) -> DecodeResult:
        """Sample up to plan.num_steps tokens for each slot; its last token is not yet cached.

        The launch ends a few steps after should_stop() returns True. while_running() is called once
        while the device works.
        """
        chosen, num_steps = plan.slots, plan.num_steps
        if self._routes is not None:
            self._routes.fetch()
        if len(plan.copy_sources):
            self._cache.copy(plan.copy_sources, plan.copy_targets)
        num_rows = next(size for size in self._sizes if size >= len(chosen))
        context = int(self._slots.num_tokens[chosen].max()) + num_steps
        shape = StepShape(
            num_rows=num_rows,
            splits=self._splits(num_rows, context),
            truncates=bool(self._slots.truncates[chosen].any()),
        )
        self._prepare(shape)
        self._state.load(chosen, self._slots, self._tables, num_rows=num_rows)
        num_steps = self._run_steps(
            shape, num_steps=num_steps, should_stop=should_stop, while_running=while_running
        )
        return self._read(len(chosen), num_steps=num_steps, truncates=shape.truncates)

    def _run_steps(
        self,
        shape: StepShape,
        *,
        num_steps: int,
        should_stop: Callable[[], bool],
        while_running: Callable[[], None],
    ) -> int:
        """Returns how many were run. The device always has the next steps queued, and no more."""
        launched: deque[torch.Event] = deque()
        for done in range(num_steps):
            if done > 0 and should_stop():
                return done
            self._graphs.run(shape)
            if done == 0:
                while_running()
            if self._device.type == "cuda":
                launched.append(torch.cuda.current_stream(self._device).record_event())
                if len(launched) > _AHEAD:
                    launched.popleft().synchronize()
        return num_steps

    def _prepare(self, shape: StepShape) -> None:
        if shape not in self._graphs:
            self._state.set_idle()
            self._graphs.capture(shape)

    def _step(self, shape: StepShape) -> None:
        """One token for each row. Runs inside CUDA graphs."""
        state, num_rows = self._state, shape.num_rows
        if self._bank is not None:
            self._bank.choose(state.adapters[:num_rows])
        lengths = state.lengths[:num_rows]
        if self._routes is not None:
            self._routes.begin_step(state.tables[:num_rows], lengths)
        hidden = hidden_states(
            self._model,
            input_ids=state.tokens[None, :num_rows],
            position_ids=(lengths - 1).clamp_min(0)[None],
            millrace_paged=DecodeLayer(
                cache=self._cache.layers[0],
                tables=state.tables,
                lengths=state.lengths,
                block_tokens=self._cache.block_tokens,
                splits=shape.splits,
            ),
        )
        logits = final_logits(self._model, hidden.to(self._model.dtype))
        drawn = sample_step(
            logits,
            state.sampling.first(num_rows),
            truncates=shape.truncates,
            capacity=self._kept_capacity,
        )
        state.advance(drawn, num_rows=num_rows)

    def _splits(self, num_rows: int, context: int) -> int:
        """Enough parts to fill the GPU, and to keep one long row from outlasting all others."""
        to_fill = _PROGRAMS // (num_rows * self._cache.num_heads)
        to_share = context // _SPLIT_TOKENS
        wanted = min(max(to_fill, to_share, 1), _MAX_SPLITS)
        return 1 << (wanted - 1).bit_length()

    def _read(self, count: int, *, num_steps: int, truncates: bool) -> DecodeResult:
        tokens, logprobs = self._state.read(count, num_steps=num_steps)
        kept = num_kept = None
        if truncates:
            kept, num_kept = self._state.read_kept(tokens)
        return DecodeResult(
            tokens=tokens,
            logprobs=logprobs,
            counts=(tokens != NO_TOKEN).sum(0),
            kept=kept,
            num_kept=num_kept,
        )


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that steps are made for: up to a third is padding, and never much."""
    sizes = [_MIN_ROWS]
    while sizes[-1] < max_rows:
        step = max(8, 1 << (sizes[-1].bit_length() - 2))
        sizes.append(sizes[-1] + step)
    return sizes
