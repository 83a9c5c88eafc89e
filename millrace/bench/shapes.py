"""Models of known shapes with random weights: what a benchmark needs, without a download."""

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

from millrace.demo.model import build_tokenizer
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model


def shapes() -> dict[str, PreTrainedConfig]:
    """By name, the configuration each model was published with."""
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


def make_model(
    name: str, *, dtype: torch.dtype, device: torch.device, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of a known shape, or the one in the directory `name`, with a tokenizer."""
    if name not in shapes() and Path(name).is_dir():
        model = load_model(name, dtype=dtype, device=device, attention=attention)
        return model, load_tokenizer(name, trust_remote_code=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shapes()[name], dtype=dtype, attn_implementation=attention
        )
    return model.eval(), build_tokenizer()
