"""The decode loop: several decode steps on the device per round trip to the host.

The host chooses the slots and reads the sampled tokens. In between, the device feeds itself its own
tokens and detects rows that end (eos token, length). Such rows idle until the launch ends, so a
launch is short while other sequences wait. Steps run as CUDA graphs, captured once per shape, over
tensors at fixed addresses, so that they stay valid across swaps. Elsewhere a step simply runs. A
capture takes as long as many steps, so a launch of a rare shape may run one with more rows, and the
capture waits until the engine is idle.

Promise: tokens, logprobs, kept ids and routes of a slot are those of single steps, up to rounding.

The engine's thread calls everything. B = rows of a step, R = slots of a launch, N = its steps,
K = kept ids, W = blocks per row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded import sampler
from millrace.inference.embedded.decode import splits
from millrace.inference.embedded.decode.adjustments import ExtraRows, top_logprobs
from millrace.inference.embedded.decode.attention import DecodeLayer
from millrace.inference.embedded.decode.state import DecodeState
from millrace.inference.embedded.kv.paged_attention import ExactBatch
from millrace.inference.embedded.parts import EngineParts
from millrace.inference.embedded.scheduling.sequence import NO_TOKEN, DecodePlan, DecodeResult
from millrace.models.exact.attention import Tiles
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits

_WARMUPS = 2  # steps before a capture: the first one compiles and allocates buffers
_MIN_ROWS = 8  # fewer cost the same, and compiled code treats 0 and 1 as special
_MOST_PADDED = 2  # times the rows that a launch needs; more would cost more than a capture
_PATIENCE = 16  # launches with more rows than they need, before one waits for the capture


class StepShape(NamedTuple):
    """What a captured graph of a step is specific to."""

    num_rows: int
    num_splits: int  # see DecodeLayer
    truncates: bool = False
    is_guided: bool = False  # some rows have a grammar
    num_adjusted: int = 0  # first rows, some of which have penalties or biases
    num_reported: int = 0  # first rows, some of which report top logprobs
    num_top: int = 0  # of these


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
        # Shapes that launches needed and others replaced, and in how many launches.
        self._deferred: dict[StepShape, int] = {}
        self._vocab_size = parts.model.config.get_text_config().vocab_size
        self._extras = ExtraRows(
            self._vocab_size,
            num_steps=self.max_steps,
            device=self._device,
            compiles=parts.compiles,
        )

    def warm_up(self) -> None:
        """Capture plain steps of powers of two rows; a start would wait long for all others."""
        with self._parts.numerics():
            for num_rows in reversed(self._sizes):  # largest first: the others fit into its memory
                if num_rows == self._sizes[-1] or not num_rows & (num_rows - 1):
                    num_splits = self._num_splits(num_rows, np.empty(0, dtype=np.int64))
                    self._prepare(StepShape(num_rows, num_splits))

    def capture_deferred(self) -> None:
        """Capture one of the shapes that launches needed, if there are some."""
        if self._deferred:
            with self._parts.numerics():
                self._prepare(next(iter(self._deferred)))

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
        shape, counts = self._chosen_shape(plan)
        assert plan.num_steps == 1 or not shape.is_guided
        self._prepare(shape)
        self._state.load(plan.slots, slots, self._parts.tables)
        splits_of = {"num_rows": shape.num_rows, "num_splits": shape.num_splits}
        self._state.load_splits(counts, **splits_of)
        if size := shape.num_adjusted:
            own, sizes = plan.slots[:size], {"vocab_size": self._vocab_size, "num_rows": size}
            self._extras.adjuster(size).load(slots.logit_changes(own, **sizes))
        first, *rest = self._steps[shape]
        running: torch.Event | None = None  # ends with the step before the last one
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
                # One step waits on the device while another runs: it never waits for the host, and
                # a launch that new weights or requests end does so soon.
                last, running = running, torch.cuda.current_stream(self._device).record_event()
                if last is not None:
                    last.synchronize()
        tokens, logprobs = self._state.read(count, num_steps=num_steps)
        kept, num_kept = self._state.read_kept(tokens) if shape.truncates else (None, None)
        top = None
        if shape.num_top:
            recorder = self._extras.recorder(shape.num_reported, shape.num_top)
            top = recorder.read(num_steps=num_steps)
        return DecodeResult(tokens, logprobs, (tokens != NO_TOKEN).sum(0), kept, num_kept, top)

    def _chosen_shape(self, plan: DecodePlan) -> tuple[StepShape, np.ndarray]:
        """The shape of a launch, and the splits of its rows [R]: of the fewest rows, or of a few
        more if only that one was captured."""
        slots, least = plan.slots, next(size for size in self._sizes if size >= len(plan.slots))
        lengths = self._parts.slots.num_tokens[slots] + plan.num_steps
        most = _MOST_PADDED * least if self._parts.sizes.defers_captures else least
        found: list[tuple[StepShape, np.ndarray]] = []
        for num_rows in (size for size in self._sizes if least <= size <= most):
            counts = self._split_counts(lengths, num_rows)
            found.append((self._shape(slots, num_rows, counts), counts))
            if found[-1][0] in self._steps:
                break
        needed, known = found[0][0], found[-1][0]
        num_launches = self._deferred.get(needed, 0)
        if known == needed or known not in self._steps or num_launches >= _PATIENCE:
            return found[0]
        self._deferred[needed] = num_launches + 1
        return found[-1]

    def _shape(self, chosen: np.ndarray, num_rows: int, split_counts: np.ndarray) -> StepShape:
        slots = self._parts.slots
        num_top = int(slots.num_top[chosen].max())
        return StepShape(
            num_rows,
            self._num_splits(num_rows, split_counts),
            truncates=bool(slots.truncates[chosen].any()),
            is_guided=bool(slots.is_guided[chosen].any()),
            num_adjusted=_num_first(slots.adjusts_logits[chosen], num_rows),
            num_reported=_num_first(slots.num_top[chosen] > 0, num_rows),
            num_top=min(1 << (num_top - 1).bit_length(), self._vocab_size) if num_top else 0,
        )

    def _prepare(self, shape: StepShape) -> None:
        """Capture graphs of this shape, if there are none. Everything they compute is garbage."""
        if shape in self._steps:
            return
        if shape.num_adjusted:
            self._extras.adjuster(shape.num_adjusted)
        if shape.num_top:
            self._extras.recorder(shape.num_reported, shape.num_top)
        parts = [lambda: self._sample(shape, self._logits(shape))]
        if shape.is_guided:
            self._state.grammar()
            parts = [
                lambda: self._state.keep_logits(self._logits(shape)),
                lambda: self._sample(shape, self._state.masked_logits(shape.num_rows)),
            ]
        if self._pool is not None:
            self._state.set_idle(num_rows=shape.num_rows, num_splits=shape.num_splits)
            parts = [self._captured(part) for part in parts]
        self._steps[shape] = parts
        self._deferred.pop(shape, None)

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
                splits=state.splits,
                arrivals=state.arrivals,
                block_tokens=cache.block_tokens,
                num_splits=shape.num_splits,
            ),
        )
        logits = final_logits(model, hidden.to(model.dtype))
        if count := shape.num_adjusted:
            self._extras.adjust(logits, num_rows=count)
        return logits

    def _sample(self, shape: StepShape, logits: Tensor) -> None:
        """Draw the next token of each row. Runs inside CUDA graphs."""
        rows = self._state.sampling.first(shape.num_rows, truncates=shape.truncates)
        drawn = sampler.sample_step(logits, rows, capacity=self._kept_capacity)
        if self._is_exact:
            drawn = sampler.with_exact_logprobs(drawn, logits, rows.temperatures)
        if count := shape.num_adjusted:
            self._extras.adjuster(count).count(drawn.tokens[:count])
        if count := shape.num_reported:
            allowed = sampler.allowed_ids(drawn.first(count), vocab_size=self._vocab_size)
            of_rows = {"drawn": (drawn.tokens[:count], drawn.logprobs[:count]), "allowed": allowed}
            own = logits[:count], rows.temperatures[:count]
            ids, logprobs = top_logprobs(*own, **of_rows, num_top=shape.num_top)
            recorder = self._extras.recorder(count, shape.num_top)
            recorder.record(self._state.step, ids=ids, logprobs=logprobs)
        self._state.advance(drawn, num_rows=shape.num_rows)

    def _exact_batch(self, num_rows: int) -> ExactBatch:
        tables, lengths = self._state.tables[:num_rows], self._state.lengths[:num_rows]
        cache, positions = self._parts.cache, (lengths - 1).clamp_min(0)
        tiles = Tiles.single(positions, lengths, tables=tables, block=cache.block_tokens)
        slots = tiles.tables.slots(tiles.sequences, positions[:, None])[:, 0].long()
        slots = torch.where(lengths > 0, slots, -1)
        return ExactBatch(cache=cache, slot_mapping=slots, tiles=tiles)

    def _split_counts(self, lengths: np.ndarray, num_rows: int) -> np.ndarray:
        if self._is_exact:  # attention without splits
            return np.ones_like(lengths)
        return splits.split_counts(lengths, num_rows=num_rows, num_heads=self._state.num_heads)

    def _num_splits(self, num_rows: int, counts: np.ndarray) -> int:
        return splits.num_splits_of(counts, num_rows=num_rows, num_heads=self._state.num_heads)


def _num_first(is_special: np.ndarray, num_rows: int) -> int:
    """The number of first rows that steps treat specially, so that all these [R] are among them. It
    has few values, because steps are captured for each of them."""
    if not is_special.any():
        return 0
    wanted = int(np.flatnonzero(is_special)[-1]) + 1
    size = _MIN_ROWS
    while size < wanted:
        size *= 4
    return min(size, num_rows)


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which steps are captured; at most a third of the rows is padding."""
    sizes = [_MIN_ROWS]
    while sizes[-1] < max_rows:
        step = max(8, 1 << (sizes[-1].bit_length() - 2))
        sizes.append(sizes[-1] + step)
    return sizes
