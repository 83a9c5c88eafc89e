"""An engine from a model directory and its settings."""

import torch
from transformers import PreTrainedModel

from millrace.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engines.embedded.engine import EmbeddedEngine
from millrace.engines.embedded.kv_cache import block_bytes
from millrace.engines.embedded.paged_attention import PAGED_ATTENTION, measure_kv
from millrace.models.directory import load_tokenizer
from millrace.models.loading import (
    load_model,
    max_context,
    resolve_device,
    stop_token_ids,
)


def build_engine(
    model_path: str, *, config: EngineConfig, trust_remote_code: bool, version: int
) -> EmbeddedEngine:
    """Load the model; its weights are `version`."""
    model = load_model(
        model_path,
        dtype=getattr(torch, config.dtype),
        device=resolve_device(config.device),
        attention=PAGED_ATTENTION,
        trust_remote_code=trust_remote_code,
    )
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    context = _context(model, config)
    return EmbeddedEngine(
        model,
        tokenizer,
        version=version,
        eos_ids=stop_token_ids(model, tokenizer),
        max_context=context,
        max_sequences=config.max_sequences,
        num_blocks=config.num_blocks or _default_num_blocks(model, config, context=context),
        block_tokens=config.block_tokens,
        prefill_tokens=config.prefill_tokens,
        kv=config.kv,
    )


def _context(model: PreTrainedModel, config: EngineConfig) -> int:
    if config.max_context is None:
        return max_context(model)
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known is not None and config.max_context > known:
        raise ConfigError(
            f"Setting 'engine.max_context' = {config.max_context} is beyond the model's own limit"
            f" of {known}; lower it, or leave it out."
        )
    return config.max_context


def _default_num_blocks(model: PreTrainedModel, config: EngineConfig, *, context: int) -> int:
    """Enough for all sequences at full context, within kv_bytes."""
    enough = config.max_sequences * -(-context // config.block_tokens)
    size = block_bytes(measure_kv(model), block_tokens=config.block_tokens, dtype=model.dtype)
    if config.kv_bytes < size:
        raise ConfigError(
            f"Setting 'engine.kv_bytes' = {config.kv_bytes} does not hold one KV block of {size}"
            " bytes; raise it."
        )
    return min(enough, config.kv_bytes // size)
