"""State that all passes of an engine share: model, batch slots, KV cache, adapters and routes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from millrace.inference.embedded.adapters import AdapterBank
from millrace.inference.embedded.decode.fused_linear import fuse_projections
from millrace.inference.embedded.decode.layers import keep_residual_in_float32, prepare
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables
from millrace.inference.embedded.kv.cache import KVCache
from millrace.inference.embedded.kv.paged_attention import measure_cache
from millrace.inference.embedded.kv.states import StatePool, StateSnapshots
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.sampler import KEPT_CAPACITY
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.sequence import BatchPlan, DecodePlan
from millrace.inference.embedded.scheduling.speculation import DraftProposer
from millrace.models.exact.mode import ExactMode, refuse, use_exact_norms
from millrace.models.lora.factors import Adapter
from millrace.models.routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """Sizes and modes of an engine; all defaults are resolved."""

    max_context: int
    max_sequences: int
    num_blocks: int
    block_tokens: int
    prefill_tokens: int
    kv: Literal["keep", "recompute"] = "keep"
    kv_dtype: torch.dtype | None = None  # of the KV cache; None = that of the model
    prefix_cache: bool = True
    num_snapshots: int = 0  # of recurrent states, for the prefix cache
    decode_steps: int = 1  # per launch on the device, at most; 1 = no decode loop
    kept_capacity: int = KEPT_CAPACITY  # see sampler.py
    # Rare steps run with more rows until they are captured, so the rounding of logits depends on
    # earlier requests.
    defers_captures: bool = False
    fast_layers: bool = False  # by kernels of Millrace; on a GPU, others by torch.compile
    exact: bool = False  # logprobs are bit for bit those of the trainer
    speculates: bool = False  # where a pass decodes one step of a model without recurrent states

    @property
    def usable_context(self) -> int:
        """A sequence that all blocks together cannot hold would never finish."""
        return min(self.max_context, self.num_blocks * self.block_tokens)


class EngineParts:
    """Shared by single passes and the decode loop."""

    def __init__(
        self,
        model: PreTrainedModel,  # loaded with PAGED_ATTENTION; changed in place for a decode loop
        sizes: EngineSizes,
        *,
        adapters: Mapping[str | None, Adapter] | None,
        routing: Routing | None,
        memory: EngineMemory | None,  # of an engine that sleeps
    ) -> None:
        context, num_blocks, num_slots = sizes.usable_context, sizes.num_blocks, sizes.max_sequences
        self.model, self.sizes = model, sizes
        self.slots = BatchSlots(num_slots, max_context=context)
        room = {"num_slots": num_slots, "max_context": context}
        self.tables = BlockTables(BlockPool(num_blocks), block_tokens=sizes.block_tokens, **room)
        if not sizes.exact:
            keep_residual_in_float32(model)
        probe = measure_cache(model)
        with nullcontext() if memory is None else memory.kv.allocating():
            self.cache = KVCache(
                probe.shapes,
                num_blocks=num_blocks,
                block_tokens=sizes.block_tokens,
                dtype=sizes.kv_dtype or model.dtype,
                device=model.device,
            )
        self.drafts: DraftProposer | None = None  # None = no speculation
        if sizes.speculates and sizes.decode_steps == 1 and not probe.layers:
            self.drafts = DraftProposer(self.slots)
        self.routes: RoutesPool | None = None  # None = routes are not recorded
        if routing is not None:
            self.routes = RoutesPool(routing, cache=self.cache, num_blocks=num_blocks)
        self.states: StatePool | None = None  # None = no layer has a recurrent state
        self.snapshots: StateSnapshots | None = None
        num_snapshots = sizes.num_snapshots if sizes.prefix_cache and probe.layers else 0
        if num_snapshots:
            rows = {"first_row": num_slots, "num_rows": num_snapshots}
            self.snapshots = StateSnapshots(self.tables, **rows)
        on_gpu = model.device.type == "cuda"
        if sizes.exact and probe.layers:
            refuse("a recurrent state")
        if sizes.exact and on_gpu:
            use_exact_norms(model)
        if probe.layers:
            # Like weights, states are saved while the engine sleeps.
            with nullcontext() if memory is None else memory.weights.allocating():
                self.states = StatePool(probe, num_rows=num_slots + num_snapshots)
        elif sizes.exact and on_gpu:
            fuse_projections(model)  # the kernels compute each output by itself
        elif sizes.decode_steps > 1 and not sizes.exact:
            prepare(
                model,
                self.cache.layers,
                probe.rules,
                max_context=context,
                fast=sizes.fast_layers,
                has_adapters=bool(adapters),
            )
        if memory is not None:
            memory.adopt(model)
        self.bank = AdapterBank(model, adapters) if adapters else None  # of unmerged adapters

    @property
    def compiles(self) -> bool:
        """Whether torch.compile builds what a decode step has no kernels for. On a CPU it would
        take longer than the steps save, and need a C++ compiler."""
        return self.sizes.fast_layers and self.model.device.type == "cuda"

    def numerics(self) -> AbstractContextManager[Any]:
        """The context of every pass."""
        return ExactMode(self.model.dtype) if self.sizes.exact else nullcontext()

    def begin_pass(self, plan: BatchPlan | DecodePlan) -> None:
        """Copy the blocks that this plan wants copied, once routes of freed blocks are read."""
        if self.routes is not None:
            self.routes.fetch()
        self.cache.copy(*plan.copies)
