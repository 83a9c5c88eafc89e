"""Builds an embedded engine from a model directory and its settings."""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import ConfigError
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.decode.fp8_layers import quantize_layers
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.fp8 import FP8
from millrace.inference.embedded.kv.cache import block_bytes
from millrace.inference.embedded.kv.paged_attention import measure_cache
from millrace.inference.embedded.kv.states import CacheProbe
from millrace.inference.embedded.parts import EngineSizes
from millrace.inference.embedded.self_test import engine_path
from millrace.models.devices import resolve_device, resolve_dtype
from millrace.models.directory import context_limit, load_tokenizer
from millrace.models.exact.mode import check_exact
from millrace.models.loading import load_model, stop_token_ids
from millrace.models.lora.factors import Adapter, adapter_of
from millrace.models.lora.folders import read_checkpoint, read_resident
from millrace.models.lora.quantized import round_base
from millrace.models.routing import Routing, find_routing

_CPU_KV_BYTES = 2**30
_GPU_KV_SHARE = 0.4  # of the free memory; a trainer may want the rest
_GIB = 2**30
DEFAULTS = EmbeddedBackend()


def build_engine(spec: EngineSpec, *, options: EmbeddedBackend = DEFAULTS) -> EmbeddedEngine:
    """Load the model and make the engine that the spec describes."""
    config, model_path = spec.config, spec.model_path
    device = resolve_device(spec.device)
    if spec.reproducible and not spec.exact:
        # Drafts depend on time and on earlier requests, and the rounding of logits on drafts.
        options = replace(options, speculation="off")
    if spec.exact:
        check_exact(device, resolve_dtype(config.dtype, device))
    try:
        model = load_model(
            model_path,
            dtype=resolve_dtype(config.dtype, device),
            device=device,
            attention=engine_path(device, exact=spec.exact),
            trust_remote_code=spec.trust_remote_code,
        )
        if spec.lora is not None and spec.lora.quantization == "nf4":
            round_base(model)  # before the merger copies it
        memory = None
        if spec.sleeps and device.type == "cuda":
            memory = EngineMemory(device, trainer_bytes=spec.trainer_bytes)
        policies = [*spec.policies]
        merger, adapters = applied_adapters(model, config=config, lora=spec.lora, policies=policies)
        if options.quantization == "fp8":
            quantize_layers(model)  # the merger has copied the 16-bit weights
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"The weights of {model_path!r} do not fit on {device} ({_free(device)}); free some"
            " memory, set engine.dtype to bfloat16, or change placement.engines."
        ) from None
    tokenizer = load_tokenizer(model_path, trust_remote_code=spec.trust_remote_code)
    engine = engine_of(
        model,
        tokenizer,
        config=config,
        version=spec.version,
        merger=merger,
        adapters=adapters,
        routing=find_routing(model) if spec.records_routes else None,
        on_warm_up=spec.on_warm_up,
        options=options,
        memory=memory,
        exact=spec.exact,
        reproducible=spec.reproducible,
    )
    if spec.adapter_path is not None:
        engine.swap(read_checkpoint(spec.adapter_path), version=spec.version)
    for policy, (folder, version) in spec.policies.items():
        if folder is not None:
            engine.swap(read_checkpoint(Path(folder)), version=version, policy=policy)
    return engine


def engine_of(
    model: PreTrainedModel,  # loaded with PAGED_ATTENTION, and quantised if it is to be
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: EngineConfig,
    version: int,
    merger: AdapterMerger | None = None,
    adapters: Mapping[str | None, Adapter] | None = None,
    routing: Routing | None = None,
    on_warm_up: Callable[[], None] = lambda: None,
    options: EmbeddedBackend = DEFAULTS,
    memory: EngineMemory | None = None,
    exact: bool = False,
    reproducible: bool = False,
) -> EmbeddedEngine:
    """An engine with these settings, ready for its first request; `reproducible` as EngineSpec."""
    on_gpu, probe = model.device.type == "cuda", measure_cache(model)
    block_tokens, kv_dtype = options.block_tokens, kv_dtype_of(options, model)
    wanted: Any = {"wanted": config.max_context, "setting": "engine.max_context"}
    context = context_limit(model.config.get_text_config(), str(model.name_or_path), **wanted)
    of_block = _size_of_block(probe, routing, block_tokens=block_tokens, kv_dtype=kv_dtype)
    states = (config.max_sequences, probe.slot_bytes)
    bound = options.kv_bytes or default_kv_bytes(model.device, memory)
    kv_bytes, num_snapshots = _room(options, bound, size=of_block, states=states)
    # At most enough for all sequences at full context.
    num_blocks = min(config.max_sequences * -(-context // block_tokens), kv_bytes // of_block)
    try:
        engine = EmbeddedEngine(
            model,
            tokenizer,
            version=version,
            merger=merger,
            adapters=adapters,
            routing=routing,
            memory=memory,
            eos_ids=stop_token_ids(model.generation_config, tokenizer),
            sizes=EngineSizes(
                max_context=context,
                max_sequences=config.max_sequences,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                prefill_tokens=options.prefill_tokens or (16384 if on_gpu else 2048),
                kv=config.kv,
                kv_dtype=kv_dtype,
                prefix_cache=options.prefix_cache,
                num_snapshots=num_snapshots,
                decode_steps=_decode_steps(model, options.launch_steps, probe),
                defers_captures=on_gpu and not reproducible,
                fast_layers=options.compile and on_gpu and not exact,
                exact=exact,
                speculates=options.speculation in (("on",) if on_gpu else ("auto", "on")),
            ),
        )
        on_warm_up()
        engine.warm_up()
    except torch.OutOfMemoryError:
        raise _too_large(num_blocks * of_block, model.device) from None
    return engine


def kv_dtype_of(options: EmbeddedBackend, model: PreTrainedModel) -> torch.dtype:
    return FP8 if options.kv_cache_dtype == "fp8" else model.dtype


def _size_of_block(
    probe: CacheProbe, routing: Routing | None, *, block_tokens: int, kv_dtype: torch.dtype
) -> int:
    """Bytes of KV and routes."""
    of_routes = 0 if routing is None else block_tokens * routing.token_bytes
    return max(1, block_bytes(probe.shapes, block_tokens=block_tokens, dtype=kv_dtype) + of_routes)


def applied_adapters(
    model: PreTrainedModel,
    *,
    config: EngineConfig,
    lora: LoraConfig | None,
    policies: Sequence[str] = (),
) -> tuple[AdapterMerger | None, dict[str | None, Adapter]]:
    """The merger of the policy's adapter, and the adapters that are applied without merging, those
    of further `policies` included. "auto" merges the policy's adapter if it is the only one: that
    rewrites the weights once per version and costs nothing per pass."""
    found = config.adapters.items()
    residents = {name: read_resident(name, Path(folder), model=model) for name, folder in found}
    if lora is None:
        return None, {**residents}
    policy = adapter_of(model, lora)
    if lora.apply == "merged" or (lora.apply == "auto" and not residents and not policies):
        return AdapterMerger(model, policy), {}
    return None, {None: policy, **dict.fromkeys(policies, policy), **residents}


def _decode_steps(model: PreTrainedModel, wanted: int | None, probe: CacheProbe) -> int:
    """Decode steps per launch; warns if a GPU decodes in single steps that were not asked for."""
    if model.device.type != "cuda" or wanted == 1:
        return wanted or 1
    if reason := _single_steps(model, wanted, probe):
        warnings.warn(reason, stacklevel=2)
        return 1
    # Triton builds its launchers with a C compiler; without one it fails in the first step.
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        raise ConfigError(
            "Decoding on a GPU needs a C compiler, and neither cc, gcc nor clang is on PATH;"
            " install one, or set engine.options.decode_steps to 1, which is several times slower."
        )
    return wanted or 32


def _single_steps(model: PreTrainedModel, wanted: int | None, probe: CacheProbe) -> str:
    """Why a GPU decodes in single steps; "" if it does not. Experts without a grouped kernel loop
    over experts and read token counts from the device, which a CUDA graph cannot do."""
    name = type(model).__name__
    has_sinks = any(rules.sinks is not None for rules in probe.rules.values())
    if has_sinks and wanted is None:
        return (
            f"{name} has attention sinks and decodes in single steps, five times slower than with"
            " the decode loop, which is less tested with sinks; to use it, set"
            " engine.options.decode_steps to 32 and engine.options.compile to false."
        )
    if any(shape.key_dim % 2 for shape in probe.shapes.values()):
        return (
            f"{name} has heads of an odd size, for which decode attention has no kernel, and"
            " decodes in single steps, several times slower than with the decode loop."
        )
    if probe.layers:
        return (
            f"{name} has layers with a recurrent state, which decode in single steps by the code of"
            " transformers, several times slower than with the decode loop."
        )
    has_experts = any(parameter.ndim == 3 for parameter in model.parameters())
    major, _ = torch.cuda.get_device_capability(model.device)
    if has_experts and not (model.dtype == torch.bfloat16 and major in (9, 10)):
        return (
            f"Experts in {model.dtype} on this GPU decode in single steps, several times slower"
            " than with the decode loop; set engine.dtype to bfloat16 on a Hopper or newer GPU."
        )
    return ""


def default_kv_bytes(device: torch.device, memory: EngineMemory | None) -> int:
    """Limit of the KV cache without a setting. An engine that sleeps shares its GPU with a trainer,
    which may not hold yet what it keeps while the engine is awake."""
    if device.type != "cuda":
        return _CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(device)
    if memory is not None and memory.trainer_bytes:
        free = min(free, total - memory.trainer_bytes - torch.cuda.memory_reserved(device))
    return max(0, int(free * _GPU_KV_SHARE))


def _room(
    options: EmbeddedBackend, bound: int, *, size: int, states: tuple[int, int]
) -> tuple[int, int]:
    """Limit of the KV cache in bytes, without recurrent states, and the number of their snapshots;
    all within `bound`. A block has `size` bytes; `states`: how many sequences have one, and its
    bytes."""
    of_states = states[0] * states[1]
    if bound < size + of_states:
        others = f" and the recurrent states of {of_states} bytes" if of_states else ""
        remedy = "raise it, or lower engine.max_sequences" if of_states else "raise it"
        raise ConfigError(
            f"Setting 'engine.options.kv_bytes' = {bound} does not hold one KV block of"
            f" {size} bytes{others}; {remedy}."
        )
    if not of_states or not options.prefix_cache:
        return bound - of_states, 0
    # A running sequence has the newest snapshot of its own, and one at the end of its prompt.
    num_snapshots = min(2 * states[0], (bound - of_states - size) // 4 // states[1])
    return bound - of_states - num_snapshots * states[1], num_snapshots


def _too_large(kv_bytes: int, device: torch.device) -> ConfigError:
    return ConfigError(
        f"The KV cache takes {kv_bytes / _GIB:.1f} GiB, which leaves too little memory for decoding"
        f" on {device} ({_free(device)}); lower engine.options.kv_bytes or engine.max_sequences."
    )


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return "out of memory"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
