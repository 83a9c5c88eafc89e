"""Models of known shapes with random weights, for benchmarks without a download."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from millrace.core.errors import ConfigError
from millrace.demo.model import build_tokenizer
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model


def shapes() -> dict[str, PreTrainedConfig]:
    """The published configurations, by name."""
    return {
        "qwen3-1.7b": Qwen3Config(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        "tiny": Qwen3Config(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        ),
    }


def shape_named(name: str) -> PreTrainedConfig:
    """A known shape such as "qwen3-1.7b", or a number of parameters such as "100e6"."""
    if name in shapes():
        return shapes()[name]
    try:
        return _shape_of(float(name))
    except ValueError:
        raise ConfigError(
            f"--model = {name!r} is not known; use {', '.join(shapes())}, a number of parameters"
            " such as 100e6, or a model directory."
        ) from None


def make_model(
    name: str, *, dtype: torch.dtype, device: torch.device, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of that shape, or the one in the directory `name`, with a tokenizer.

    Random weights are drawn on the device, since drawing them on the host may take minutes.
    """
    if name not in shapes() and Path(name).is_dir():
        model = load_model(name, dtype=dtype, device=device, attention=attention)
        return model, load_tokenizer(name, trust_remote_code=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape_named(name), dtype=dtype, attn_implementation=attention
        )
    return model.eval(), build_tokenizer()


def _shape_of(num_parameters: float) -> Qwen3Config:
    hidden = 1024 if num_parameters < 1e9 else 2048
    per_layer = 14 * hidden**2  # attention 4, MLP 3 x 3 1/3
    return Qwen3Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 10 // 3,
        num_hidden_layers=max(1, round((num_parameters - 2048 * hidden) / per_layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
