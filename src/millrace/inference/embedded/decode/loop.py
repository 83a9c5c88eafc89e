"""Decodes in rounds: several steps on the device for one round trip to the host.

The host says which lanes take part and reads what they sampled; in between, the device feeds itself
its own tokens and notices by itself which rows have ended (eos token, length). Rows that end early
idle until the round is over, so a round is short when others wait for their places.

Promise: a lane's tokens, logprobs, kept ids and routes are those that single steps would have
given.

Called by the engine's thread. R = lanes of the round, N = its steps, K = kept ids.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.attention import DecodeLayer
from millrace.inference.embedded.decode.graphs import StepGraphs, StepShape
from millrace.inference.embedded.decode.sampling import draw
from millrace.inference.embedded.decode.state import NOTHING, RoundState
from millrace.inference.embedded.kv.blocks import BlockTables
from millrace.inference.embedded.kv.cache import KVCache
from millrace.inference.embedded.lora.bank import AdapterBank
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import RoundPlan
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits

_MIN_ROWS = 8  # fewer cost the same, and compiled code treats 0 and 1 as special
_AHEAD = 2  # steps queued on the device: it never waits for the host, and a round soon ends
_PROGRAMS = 512  # attention programs that keep a GPU busy, about
_SPLIT_TOKENS = 2048  # of context per split, at most
_MAX_SPLITS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundResult:
    """What the lanes of a round sampled: the first `counts` entries of each column."""

    tokens: np.ndarray  # [N, R] int32
    logprobs: np.ndarray  # [N, R] float32
    counts: np.ndarray  # [R] int64
    # If some lanes truncate: ids [K] int32, step after step and in each lane after lane, and how
    # many of them belong to each token, [N, R] int32; 0 = nothing was ruled out.
    kept: np.ndarray | None
    num_kept: np.ndarray | None


class DecodeLoop:
    def __init__(
        self,
        model: PreTrainedModel,  # made ready by layers.prepare
        *,
        lanes: BatchSlots,
        tables: BlockTables,
        cache: KVCache,
        eos_ids: Sequence[int],
        max_steps: int,
        kept_capacity: int,  # ids per token; a lane that kept more is left to single steps
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
        self._lanes = lanes
        self._tables = tables
        self._cache = cache
        self._sizes = row_sizes(len(lanes.occupied))
        self._state = RoundState(
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
        self, plan: RoundPlan, *, should_stop: Callable[[], bool], meanwhile: Callable[[], None]
    ) -> RoundResult:
        """Up to plan.num_steps tokens for each of its lanes, whose last one is not yet cached.

        The round ends within some steps of should_stop() becoming true; meanwhile() is called once,
        while the device works.
        """
        chosen, num_steps = plan.lanes, plan.num_steps
        if self._routes is not None:
            self._routes.fetch()
        if len(plan.copy_sources):
            self._cache.copy(plan.copy_sources, plan.copy_targets)
        num_rows = next(size for size in self._sizes if size >= len(chosen))
        context = int(self._lanes.num_tokens[chosen].max()) + num_steps
        shape = StepShape(
            num_rows=num_rows,
            splits=self._splits(num_rows, context),
            truncates=bool(self._lanes.truncates[chosen].any()),
        )
        self._prepare(shape)
        self._state.load(chosen, self._lanes, self._tables, num_rows=num_rows)
        num_steps = self._run_steps(
            shape, num_steps=num_steps, should_stop=should_stop, meanwhile=meanwhile
        )
        return self._read(len(chosen), num_steps=num_steps, truncates=shape.truncates)

    def _run_steps(
        self,
        shape: StepShape,
        *,
        num_steps: int,
        should_stop: Callable[[], bool],
        meanwhile: Callable[[], None],
    ) -> int:
        """Returns how many were run. The device always has the next steps queued, and no more."""
        launched: deque[torch.Event] = deque()
        for done in range(num_steps):
            if done > 0 and should_stop():
                return done
            self._graphs.run(shape)
            if done == 0:
                meanwhile()
            if self._device.type == "cuda":
                launched.append(torch.cuda.current_stream(self._device).record_event())
                if len(launched) > _AHEAD:
                    launched.popleft().synchronize()
        return num_steps

    def _prepare(self, shape: StepShape) -> None:
        if shape not in self._graphs:
            self._state.rest()
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
        drawn = draw(
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

    def _read(self, count: int, *, num_steps: int, truncates: bool) -> RoundResult:
        tokens, logprobs = self._state.read(count, num_steps=num_steps)
        kept = num_kept = None
        if truncates:
            kept, num_kept = self._state.read_kept(tokens)
        return RoundResult(
            tokens=tokens,
            logprobs=logprobs,
            counts=(tokens != NOTHING).sum(0),
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
