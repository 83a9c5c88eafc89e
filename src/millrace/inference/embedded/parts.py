"""The parts of an engine that depend on its model and sizes, built and connected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from millrace.inference.embedded.decode.layers import prepare
from millrace.inference.embedded.decode.loop import DecodeLoop
from millrace.inference.embedded.decode.prefill import can_flash
from millrace.inference.embedded.decode.sampling import KEPT_CAPACITY
from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables
from millrace.inference.embedded.kv.paged_attention import new_cache
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.lora.bank import AdapterBank
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.runner import ModelRunner
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.scheduler import Scheduler
from millrace.models.lora.factors import Adapter
from millrace.models.routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """Sizes and modes of an engine, with nothing left to decide."""

    max_context: int
    max_sequences: int
    num_blocks: int
    block_tokens: int
    prefill_tokens: int
    kv: Literal["keep", "recompute"] = "keep"
    prefix_cache: bool = True
    round_steps: int = 1  # decode steps of each sequence per launch on the device, at most
    kept_capacity: int = KEPT_CAPACITY  # kept ids per token that the decode loop has room for
    compile_layers: bool = False

    @property
    def usable_context(self) -> int:
        """A sequence that the blocks cannot hold alone would never finish."""
        return min(self.max_context, self.num_blocks * self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineParts:
    pool: BlockPool
    slots: BatchSlots
    scheduler: Scheduler
    bank: AdapterBank | None
    runner: ModelRunner
    decode_loop: DecodeLoop | None  # None = single steps only
    routes: RoutesPool | None  # None = routes are not recorded


def make_parts(
    model: PreTrainedModel,  # loaded with PAGED_ATTENTION; changed in place for a decode loop
    sizes: EngineSizes,
    *,
    version: int,
    adapters: Mapping[str | None, Adapter] | None,
    routing: Routing | None,
    eos_ids: Sequence[int],
) -> EngineParts:
    max_context, block_tokens = sizes.usable_context, sizes.block_tokens
    pool = BlockPool(sizes.num_blocks)
    slots = BatchSlots(sizes.max_sequences, max_context=max_context)
    tables = BlockTables(
        pool, num_slots=sizes.max_sequences, max_context=max_context, block_tokens=block_tokens
    )
    cache = new_cache(model, num_blocks=sizes.num_blocks, block_tokens=block_tokens)
    routes = None
    if routing is not None:
        routes = RoutesPool(routing, cache=cache, num_blocks=sizes.num_blocks, device=model.device)
    prefixes = PrefixCache(
        pool,
        block_tokens=block_tokens,
        version=version,
        keeps=sizes.kv == "keep",
        is_on=sizes.prefix_cache,
    )
    scheduler = Scheduler(
        slots, tables, prefixes=prefixes, prefill_tokens=sizes.prefill_tokens, routes=routes
    )
    has_loop = sizes.round_steps > 1
    if has_loop:
        prepare(model, cache.layers, compile_layers=sizes.compile_layers)
    shared = {
        "slots": slots,
        "tables": tables,
        "cache": cache,
        "bank": AdapterBank(model, adapters) if adapters else None,
        "routes": routes,
    }
    runner = ModelRunner(model, **shared, flashes=has_loop and can_flash(cache, model=model))
    decode_loop = None
    if has_loop:
        decode_loop = DecodeLoop(
            model,
            **shared,
            eos_ids=eos_ids,
            max_steps=sizes.round_steps,
            kept_capacity=sizes.kept_capacity,
            compiles=sizes.compile_layers,
        )
    return EngineParts(
        pool=pool,
        slots=slots,
        scheduler=scheduler,
        bank=shared["bank"],
        runner=runner,
        decode_loop=decode_loop,
        routes=routes,
    )
