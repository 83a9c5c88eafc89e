"""The parts of an engine that hang together by its model and sizes, made and joined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from millrace.inference.embedded.decode.layers import prepare
from millrace.inference.embedded.decode.loop import DecodeLoop
from millrace.inference.embedded.decode.prefill import can_flash
from millrace.inference.embedded.kv.blocks import BlockPool, BlockTables
from millrace.inference.embedded.kv.paged_attention import new_cache
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.lora.bank import AdapterBank
from millrace.inference.embedded.routes import RoutesPool
from millrace.inference.embedded.runner import Runner
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.scheduler import Scheduler
from millrace.models.lora.factors import Adapter
from millrace.models.moe.routing import Routing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineParts:
    pool: BlockPool
    lanes: BatchSlots
    scheduler: Scheduler
    bank: AdapterBank | None
    runner: Runner
    rounds: DecodeLoop | None  # None = single steps only
    routes: RoutesPool | None  # of a mixture of experts, if they are noted


def make_parts(
    model: PreTrainedModel,  # loaded with PAGED_ATTENTION; changed in place where there are rounds
    *,
    version: int,
    adapters: Mapping[str | None, Adapter] | None,
    routing: Routing | None,
    eos_ids: Sequence[int],
    max_context: int,
    max_sequences: int,
    num_blocks: int,
    block_tokens: int,
    prefill_tokens: int,
    keeps_kv: bool,
    prefix_cache: bool,
    round_steps: int,
    kept_capacity: int,
    compile_layers: bool,
) -> EngineParts:
    pool = BlockPool(num_blocks)
    lanes = BatchSlots(max_sequences, max_context=max_context)
    tables = BlockTables(
        pool, num_lanes=max_sequences, max_context=max_context, block_tokens=block_tokens
    )
    cache = new_cache(model, num_blocks=num_blocks, block_tokens=block_tokens)
    routes = None
    if routing is not None:
        routes = RoutesPool(routing, cache=cache, num_blocks=num_blocks, device=model.device)
    prefixes = PrefixCache(
        pool, block_tokens=block_tokens, version=version, keeps=keeps_kv, is_on=prefix_cache
    )
    scheduler = Scheduler(
        lanes, tables, prefixes=prefixes, prefill_tokens=prefill_tokens, routes=routes
    )
    has_rounds = round_steps > 1
    if has_rounds:
        prepare(model, cache.layers, compile_layers=compile_layers)
    bank = AdapterBank(model, adapters) if adapters else None
    runner = Runner(
        model,
        lanes=lanes,
        tables=tables,
        cache=cache,
        bank=bank,
        routes=routes,
        flashes=has_rounds and can_flash(cache, model=model),
    )
    rounds = None
    if has_rounds:
        rounds = DecodeLoop(
            model,
            lanes=lanes,
            tables=tables,
            cache=cache,
            eos_ids=eos_ids,
            max_steps=round_steps,
            kept_capacity=kept_capacity,
            compiles=compile_layers,
            bank=bank,
            routes=routes,
        )
    return EngineParts(
        pool=pool,
        lanes=lanes,
        scheduler=scheduler,
        bank=bank,
        runner=runner,
        rounds=rounds,
        routes=routes,
    )
